"""The noise: Random123's known answers, golden values of our own, and the same bits in every version."""

import ctypes
import math

import pytest
import torch

from millstream.kernels.backend import load_library
from millstream.kernels.noise import (
    MAX_GUMBEL,
    Words,
    gumbel,
    log,
    philox4x32,
    random_words,
    uniform,
    vocabulary_words,
)

# From kat_vectors of Random123 (philox4x32, 10 rounds): counter, key, block.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# (seed, position, token id): word, noise. Any change here changes the text of every seeded request.
GOLDEN = [
    (0, 0, 0, 0x6627E8D5, "0x1.5b6c7ac8fd9dcp-4"),
    (1, 0, 0, 0xE3E80670, "0x1.1377353634645p+1"),
    (0, 1, 0, 0x6AD0C5EC, "0x1.13a3ebe49d0c1p-3"),
    (0, 0, 1, 0xE169C58D, "0x1.07e48418102fap+1"),
    (42, 17, 49151, 0xD8F29DCB, "0x1.cc74c852d5d25p+0"),
    (-1, 4294967301, 262143, 0xA70DA6F7, "0x1.b3dc26f2bc058p-1"),
    (9223372036854775807, 131071, 2, 0x088658B0, "-0x1.3973b7f7c4c1dp+0"),
]


def tensors(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def random_inputs(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 2**40, (count,), generator=generator)
    return seeds, positions, torch.randint(0, 2**20, (count,), generator=generator)


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: Words, key: tuple[int, int], block: tuple[int, ...]) -> None:
    k0, k1 = tensors(*key)
    c0, c1, c2, c3 = tensors(*(int(c) for c in counter))
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == block


@pytest.mark.parametrize(("seed", "position", "token_id", "word", "noise"), GOLDEN)
def test_noise_stays_what_it_is(seed: int, position: int, token_id: int, word: int, noise: str) -> None:
    inputs = tensors(seed, position, token_id)
    assert int(random_words(*inputs)) == word
    assert float(gumbel(*inputs)).hex() == noise


def test_a_token_takes_its_own_word_of_the_block() -> None:
    ids = torch.arange(8)
    seeds, positions = torch.full_like(ids, 7), torch.full_like(ids, 9)
    blocks = [philox4x32(*((c, p, z, z), (k, z))) for c, p, z, k in [tensors(i, 9, 0, 7) for i in range(2)]]
    assert random_words(seeds, positions, ids).tolist() == [int(word) for block in blocks for word in block]


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_the_words_of_a_vocabulary_are_those_of_its_tokens(num_tokens: int) -> None:
    seeds, positions, _ = random_inputs(3)
    ids = torch.arange(num_tokens)
    words = [random_words(seeds[i].expand(num_tokens), positions[i].expand(num_tokens), ids) for i in range(3)]
    assert torch.equal(vocabulary_words(seeds, positions, num_tokens), torch.stack(words))


@pytest.mark.usefixtures("c_compiler")
def test_c_and_torch_give_the_same_bits() -> None:
    library = load_library("cpu_sampling.c")
    assert library is not None
    inputs = random_inputs(5000)
    out = torch.empty(5000, dtype=torch.float64)
    library.gumbel_noise(*(ctypes.c_void_p(x.data_ptr()) for x in (out, *inputs)), ctypes.c_int64(5000))
    assert torch.equal(out, gumbel(*inputs))


def test_the_logarithm_is_right_everywhere_noise_asks_for_it() -> None:
    words = torch.cat((torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), random_words(*random_inputs(2000))))
    inner = -log(uniform(words))
    for u, x in zip(uniform(words).tolist(), inner.tolist(), strict=True):
        assert x == pytest.approx(-math.log(u), rel=1e-14)
        assert -float(log(torch.tensor([x], dtype=torch.float64))) == pytest.approx(-math.log(x), rel=1e-13, abs=1e-15)


def test_noise_is_finite_below_its_bound_and_has_gumbels_moments() -> None:
    extreme = -log(-log(uniform(torch.tensor([0, 2**32 - 1]))))
    assert extreme.isfinite().all()
    assert float(extreme.max()) < MAX_GUMBEL
    noise = gumbel(*random_inputs(200_000))
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
