"""Penalties, logit bias and bitmasks: what they mean, whichever version runs."""

import pytest
import torch

from millstream.kernels.backend import set_backend
from millstream.kernels.logits import (
    PenaltyTensors,
    TokenLists,
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
)

MINUS_INF = float("-inf")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True, params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> None:
    """Both versions mean the same."""
    set_backend(request.param)


def penalise(
    logits: list[float], counts: dict[int, int], *, repetition: float = 1, frequency: float = 0, presence: float = 0
) -> list[float]:
    """One row."""
    row = torch.tensor([logits])
    tokens = TokenLists(int32(0), int32(len(counts)), int32(*counts))
    columns = (torch.tensor([value]) for value in (float(repetition), float(frequency), float(presence)))
    apply_penalties(row, tokens, int32(*counts.values()), PenaltyTensors(*columns))
    return row[0].tolist()


def test_repetition_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    assert penalise([3.0, -3.0, 0.0, 5.0], {0: 0, 1: 2, 2: 1}, repetition=2) == [1.5, -6.0, 0.0, 5.0]


def test_frequency_counts_and_presence_does_not() -> None:
    assert penalise([1.0, 1.0, 1.0], {0: 1, 2: 4}, frequency=0.5) == [0.5, 1.0, -1.0]
    assert penalise([1.0, 1.0, 1.0], {0: 1, 2: 4}, presence=0.5) == [0.5, 1.0, 0.5]


def test_tokens_of_the_prompt_alone_get_the_repetition_penalty_only() -> None:
    assert penalise([4.0], {0: 0}, repetition=2, frequency=1, presence=1) == [2.0]


def test_repetition_comes_first() -> None:
    assert penalise([4.0], {0: 3}, repetition=2, frequency=0.25, presence=0.5) == [4 / 2 - 0.75 - 0.5]


def test_rows_have_their_own_lists_and_parameters() -> None:
    logits = torch.ones(3, 4)
    tokens = TokenLists(int32(0, 5, 2), int32(2, 5, 3), int32(0, 1, 3, 9, 9))
    penalties = PenaltyTensors(torch.ones(3), torch.tensor([1.0, 1.0, 2.0]), torch.zeros(3))
    apply_penalties(logits, tokens, int32(1, 2, 1, 9, 9), penalties)
    assert logits.tolist() == [[0, -1, 1, 1], [1, 1, 1, 1], [1, 1, 1, -1]]


def test_biases_are_added_and_minus_infinity_forbids() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    tokens = TokenLists(int32(0, 2), int32(2, 3), int32(2, 0, 1))
    apply_logit_bias(logits, tokens, torch.tensor([MINUS_INF, 0.5, -1.0]))
    assert logits.tolist() == [[1.5, 2.0, MINUS_INF], [4.0, 4.0, 6.0]]


def test_a_token_that_is_named_twice_gets_both_biases() -> None:
    logits = torch.zeros(1, 3)
    tokens = TokenLists(int32(0), int32(4), int32(1, 2, 1, 2))
    apply_logit_bias(logits, tokens, torch.tensor([1.0, MINUS_INF, 2.0, 100.0]))
    assert logits.tolist() == [[0.0, 3.0, MINUS_INF]]


@pytest.mark.parametrize("token_id", [3, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_an_error(token_id: int) -> None:
    logits = torch.zeros(2, 3)[:1]
    tokens = TokenLists(int32(0), int32(1), int32(token_id))
    ones = torch.ones(1)
    with pytest.raises((IndexError, RuntimeError)):
        apply_logit_bias(logits, tokens, ones)
    with pytest.raises((IndexError, RuntimeError)):
        apply_penalties(logits, tokens, int32(1), PenaltyTensors(ones, ones, ones))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100, 8191, 8192, 8193, 20000])
def test_bit_v_of_the_words_allows_token_v(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_words = -(-vocab_size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (2, num_words), generator=generator).int()
    logits = torch.randn(3, vocab_size, generator=generator)
    expected = logits.clone()
    for row, mask in ((0, 1), (2, 0)):
        words = bitmask[mask].tolist()
        for token_id in range(vocab_size):
            if not words[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = MINUS_INF
    apply_token_bitmask(logits, bitmask, int32(1, -1, 0))
    assert torch.equal(logits, expected)


def test_masked_logits_may_be_anything() -> None:
    logits = torch.tensor([[float("nan"), float("inf"), MINUS_INF, 1.0]])
    apply_token_bitmask(logits, int32(0b1000)[None], int32(0))
    assert logits.tolist() == [[MINUS_INF, MINUS_INF, MINUS_INF, 1.0]]


def test_a_mask_for_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="2 words of a bitmask do not fit 65 tokens"):
        apply_token_bitmask(torch.zeros(1, 65), torch.zeros(1, 2, dtype=torch.int32), int32(0))


def test_a_mask_that_is_not_there_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        apply_token_bitmask(torch.zeros(1, 32), int32(-1)[None], int32(1))


def test_the_neighbours_of_a_row_in_memory_stay_as_they_are() -> None:
    wide = torch.zeros(2, 20)
    logits = wide[:, 3:13]
    apply_token_bitmask(logits, int32(0)[None], int32(0, 0))
    assert torch.equal(wide[:, :3], torch.zeros(2, 3))
    assert torch.equal(wide[:, 13:], torch.zeros(2, 7))
    assert bool((logits == MINUS_INF).all())
