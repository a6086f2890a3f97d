"""Every way in which ranks talk gives the same results."""

import hashlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from millstream.kernels.backend import set_backend
from millstream.kernels.collectives import is_ordered
from millstream.kernels.graph import Arena, NotRecordable, record
from millstream.kernels.native import OperatorError, run_nodes
from millstream.tp_worker.communicator import Communicator, CommunicatorError, SingleCommunicator
from tests.tp_worker.ranks import communicators, run_ranks

SEED = 20260
SMALL_SLOT = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("shared memory", "shared memory in torch", "gloo")


@pytest.fixture(autouse=True)
def any_backend() -> Iterator[None]:
    """A test may choose the backend, before it makes ranks, and the number of threads."""
    num_threads = torch.get_num_threads()
    yield
    set_backend("auto")
    torch.set_num_threads(num_threads)


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
def test_random_collectives_give_the_sums_and_copies_with_the_same_bits_on_all_ranks(kind: str, size: int) -> None:
    if kind == "shared memory in torch":
        if not is_ordered():
            pytest.skip("the torch version needs ordered stores")
        set_backend("torch")
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
def test_a_rank_that_does_not_come_is_named_after_the_timeout(version: str) -> None:
    if version == "torch":
        set_backend("torch")
    lonely = communicators("shared memory", 2, timeout=0.05)(0)
    with pytest.raises(CommunicatorError, match="rank 1 did not arrive in time"):
        lonely.all_reduce(torch.ones(4))


@pytest.mark.parametrize("version", ["native", "torch"])
def test_ranks_that_disagree_on_a_payload_are_told(version: str) -> None:
    if version == "torch":
        set_backend("torch")
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
            set_backend("torch")
        communicator = make(rank)
        x = torch.arange(5000.0)
        for _ in range(20):
            communicator.all_reduce(x).mul_(0.5)
        return torch.equal(x, torch.arange(5000.0))

    assert run_ranks(2, run) == [True, True]


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("size", [2, 3])
def test_recorded_collectives_run_again_and_again_on_what_their_tensors_hold_then(size: int) -> None:
    make = communicators("shared memory", size, slot_bytes=SMALL_SLOT)

    def run(rank: int) -> bool:
        communicator, arena = make(rank), Arena(2**20)
        start = arena.new_empty((1,), torch.uint8).data_ptr()
        assert communicator.is_recordable
        first, second, ids = torch.empty(5000, dtype=torch.bfloat16), torch.empty(3, 7 + rank), torch.empty(4).long()
        with record(arena) as graph:
            communicator.all_reduce(first)
            gathered = communicator.gather_to_first(second, [7 + peer for peer in range(size)])
            communicator.broadcast_first(ids)
        assert all(0 <= x.data_ptr() - start < 2**20 for x in (gathered or [])[1:])
        for index in range(5):
            first.fill_(index + rank)
            second.fill_(10 * index + rank)
            ids.fill_(index if rank == 0 else -1)
            run_nodes(graph.nodes())
            assert first.tolist() == [size * index + size * (size - 1) // 2] * 5000
            assert ids.tolist() == [index] * 4
            expected = [torch.full((3, 7 + peer), 10.0 * index + peer) for peer in range(size)]
            assert all(map(torch.equal, gathered or expected, expected))
        return gathered is not None

    assert run_ranks(size, run) == [rank == 0 for rank in range(size)]


@pytest.mark.usefixtures("c_compiler")
def test_a_peer_that_fails_inside_a_graph_is_named() -> None:
    lonely, x = communicators("shared memory", 2, timeout=0.05)(0), torch.ones(4)
    with record(Arena(2**10)) as graph:
        lonely.all_reduce(x)
    with pytest.raises(OperatorError) as raised:
        run_nodes(graph.nodes())
    explained = lonely.explain(raised.value)
    assert isinstance(explained, CommunicatorError)
    assert str(explained) == "tensor-parallel rank 0: rank 1 did not arrive in time"
    other = OperatorError(1)
    assert lonely.explain(other) is other


def test_what_torch_would_do_is_not_recordable() -> None:
    make = communicators("shared memory", 2)
    with record(Arena(2**10)), pytest.raises(NotRecordable):
        make(0).all_reduce(torch.ones(4, dtype=torch.float16))
    set_backend("torch")
    assert not communicators("shared memory", 2)(0).is_recordable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_team_of_threads_sums_a_large_payload_as_one_thread_does(dtype: torch.dtype) -> None:
    ranks = list(map(communicators("shared memory", 2, slot_bytes=2**17), range(2)))
    payloads = [payload(0, rank, 200_003, dtype) for rank in range(2)]
    expected = (payloads[0].float() + payloads[1].float()).to(dtype)

    def run(rank: int) -> None:
        torch.set_num_threads(3)
        ranks[rank].all_reduce(payloads[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert torch.equal(payloads[0], expected)
    assert torch.equal(payloads[1], expected)


def test_ranks_that_share_a_core_give_it_away_while_they_wait() -> None:
    make = communicators("shared memory", 3)

    def run(rank: int) -> float:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        communicator, x = make(rank), torch.zeros(576, dtype=torch.bfloat16)
        start = time.process_time()
        for _ in range(200):
            communicator.all_reduce(x)
        return (time.process_time() - start) / 200

    assert sum(run_ranks(3, run)) < 1e-3  # a rank that kept the core would use up its time slice, milliseconds


def test_a_single_rank_keeps_what_it_has() -> None:
    alone, x = SingleCommunicator(), torch.ones(3)
    assert alone.is_recordable
    assert alone.all_reduce(x) is x
    assert alone.broadcast_first(x) is x
    gathered = alone.gather_to_first(x)
    assert gathered is not None
    assert gathered[0] is x
