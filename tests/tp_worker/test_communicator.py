"""Every way in which ranks talk gives the same results."""

import hashlib
import os
import random
from typing import Any

import pytest
import torch

from millstream.kernels import collectives
from millstream.kernels.collectives import is_ordered
from millstream.tp_worker.communicator import Communicator, CommunicatorError, SingleCommunicator
from tests.tp_worker.ranks import communicators, run_ranks

SEED = 20260
SMALL_SLOT = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("shared memory", "shared memory in torch", "gloo")


def payload(round_index: int, rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends in a round: known to every rank."""
    generator = torch.Generator().manual_seed(SEED * 1000 + round_index * 10 + rank)
    return torch.randn(num_elements, generator=generator).to(dtype)


def one_round(communicator: Communicator, index: int, draw: random.Random) -> bytes:
    """One collective with random kind, size and type, checked; returns what this rank holds after it."""
    rank, size = communicator.rank, communicator.size
    dtype = draw.choice(DTYPES)
    num_elements = draw.choice((1, 7, 576, 1024, 1025, draw.randint(1, 10_000)))
    kind = draw.choice(("all_reduce", "all_reduce", "gather", "broadcast"))
    widths = [draw.randint(1, 3000) for _ in range(size)] if draw.random() < 0.5 else [num_elements] * size
    everyone = [payload(index, peer, widths[peer] if kind == "gather" else num_elements, dtype) for peer in range(size)]
    own = everyone[rank].clone()
    if kind == "gather":
        gathered = communicator.gather_to_first(own, widths)
        assert (gathered is None) == (rank > 0)
        assert all(torch.equal(a, b) for a, b in zip(gathered or [], everyone, strict=False))
        return b""
    if kind == "broadcast":
        assert communicator.broadcast_first(own) is own
        assert torch.equal(own, everyone[0])
    else:
        assert communicator.all_reduce(own) is own
        total = sum(x.float() for x in everyone)
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(own.float(), total, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)
    return bytes(own.view(torch.uint8).numpy().tobytes())


def open_communicator(kind: str, size: int) -> Any:
    """A maker of communicators of this kind."""
    return communicators("gloo" if kind == "gloo" else "shared memory", size, slot_bytes=SMALL_SLOT)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_random_collectives_give_the_sums_and_copies_with_the_same_bits_on_all_ranks(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "shared memory in torch":
        if not is_ordered():
            pytest.skip("the torch version needs ordered stores")
        monkeypatch.setattr(collectives, "native_library", lambda: None)
    make = open_communicator(kind, size)

    def run(rank: int) -> str:
        communicator, draw, held = make(rank), random.Random(SEED), hashlib.sha256()
        for index in range(40 if kind == "gloo" else 120):
            held.update(one_round(communicator, index, draw))
        communicator.close()
        return held.hexdigest()

    assert len(set(run_ranks(size, run))) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_thousands_of_reductions_on_one_core_never_mix_up_their_rounds(size: int) -> None:
    make = communicators("shared memory", size, slot_bytes=SMALL_SLOT)

    def run(rank: int) -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        communicator = make(rank)
        for index in range(3000):
            x = torch.full((8,), float(index % 1000 + rank))
            communicator.all_reduce(x)
            assert x.tolist() == [float(size * (index % 1000) + size * (size - 1) // 2)] * 8
        return rank

    assert run_ranks(size, run) == list(range(size))


@pytest.mark.parametrize("version", ["native", "torch"])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version == "torch":
        monkeypatch.setattr(collectives, "native_library", lambda: None)
    lonely = communicators("shared memory", 2, timeout=0.05)(0)
    with pytest.raises(CommunicatorError, match="rank 1 did not arrive in time"):
        lonely.all_reduce(torch.ones(4))


@pytest.mark.parametrize("version", ["native", "torch"])
def test_ranks_that_disagree_on_a_payload_are_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version == "torch":
        monkeypatch.setattr(collectives, "native_library", lambda: None)
    make = communicators("shared memory", 2)

    def run(rank: int) -> str:
        try:
            make(rank).all_reduce(torch.ones(4 + rank))
        except CommunicatorError as error:
            return str(error)
        return "agreed"

    first, second = run_ranks(2, run)
    assert "rank 1 sends something else" in first
    assert "rank 0 sends something else" in second


def test_both_versions_can_be_mixed_because_they_share_one_protocol() -> None:
    if not is_ordered():
        pytest.skip("the torch version needs ordered stores")
    make = communicators("shared memory", 2, slot_bytes=SMALL_SLOT)

    def run(rank: int) -> bool:
        if rank:
            collectives.native_library = lambda: None
        communicator = make(rank)
        x = torch.arange(5000.0)
        for _ in range(20):
            communicator.all_reduce(x).mul_(0.5)
        return torch.equal(x, torch.arange(5000.0))

    assert run_ranks(2, run) == [True, True]


def test_a_single_rank_keeps_what_it_has() -> None:
    alone, x = SingleCommunicator(), torch.ones(3)
    assert alone.all_reduce(x) is x
    assert alone.broadcast_first(x) is x
    gathered = alone.gather_to_first(x)
    assert gathered is not None
    assert gathered[0] is x
