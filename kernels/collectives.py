"""All-reduce, gather and broadcast between processes of one host, over shared memory.

Contract: `size` ranks map the same memory of `memory_bytes(size, slot_bytes)` zeroed bytes and enter the same
collectives in the same order. `all_reduce` sums float32 or bfloat16 in float32, in rank order, so that every rank
obtains the same bits. `gather` brings every rank's bytes to rank 0; `broadcast` brings rank 0's to all.
Raises PeerError where a rank does not arrive within the timeout or sends another number of bytes than expected; where
they were recorded into a graph, running it raises OperatorError with a code that `peer_error` explains.

Method: each rank owns a header and two slots. A payload goes in rounds of at most a slot; round s uses slot s & 1.
A rank fills its slot, then raises its round counter (release); readers wait for it (acquire). Whoever has entered round
s has done reading round s - 1, so before filling a slot for round s + 1 it is enough that all have entered round s:
no second barrier. Waiting spins for 2 us, then gives the core away: that costs little where nobody else wants it, and
where ranks share a core, a longer spin is what a round takes.

Two versions: C (`collectives.c`), and torch, which relies on x86's ordering of stores and can not be recorded.
"""

import ctypes
import math
import mmap
import os
import platform
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from .backend import find_function, is_reference_forced
from .native import INT64, POINTER, OperatorError, launch, new_empty

SOURCE = "collectives.c"
HEADER_BYTES = 256
SPIN_NS = 2_000
YIELD_NS = 2_000_000
SLEEP_SECONDS = 50e-6
LATE, DISAGREES, MAX_RANKS = 0x10000, 0x20000, 0x10000


class PeerError(RuntimeError):
    """`peer` did not arrive in time (`late`) or does not agree on what is sent."""

    def __init__(self, peer: int, *, late: bool) -> None:
        super().__init__(f"rank {peer} {'did not arrive in time' if late else 'sends something else'}")
        self.peer = peer


def peer_error(code: int) -> PeerError | None:
    """What the code of an OperatorError says about a peer; None where another operator failed."""
    if not LATE <= code < DISAGREES + MAX_RANKS:
        return None
    return PeerError(code % MAX_RANKS, late=code < DISAGREES)


class Collectives(Protocol):
    """Both versions; tensors are contiguous and on the CPU."""

    is_recordable: bool

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over the ranks, in place; float32 or bfloat16."""

    def gather(self, x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
        """On rank 0 every rank's x (its own first, not copied), whose shapes are given; None on the others."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's bytes, in place."""


def memory_bytes(size: int, slot_bytes: int) -> int:
    """Bytes that `size` ranks share."""
    return size * (HEADER_BYTES + 2 * slot_bytes)


def is_ordered() -> bool:
    """Whether this machine keeps the order of stores, which the torch version needs."""
    return platform.machine().lower() in {"x86_64", "amd64"}


def can_share_memory() -> bool:
    """Whether either version works here; else the ranks must talk in another way."""
    return is_ordered() or has_native_version()


def has_native_version() -> bool:
    """Whether the C version can be had and may run."""
    sources = ((SOURCE, "all_reduce"), ("cpu_graph.c", "run_graph"))
    return not is_reference_forced() and all(find_function(source, symbol) is not None for source, symbol in sources)


def open_collectives(memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout: float) -> Collectives:
    """The C version where it can be had, else torch's; `timeout` in seconds."""
    version = NativeCollectives if has_native_version() else TorchCollectives
    return version(memory, rank, size, slot_bytes, timeout)


def num_bytes(x: torch.Tensor) -> int:
    """Payload of a tensor."""
    return x.numel() * x.element_size()


class Group(ctypes.Structure):
    """group_t of collectives.c: C counts the rounds in it, so it stays where it is."""

    _fields_ = (
        ("memory", POINTER),
        *((name, INT64) for name in ("rank", "size", "slot_bytes", "spin_ns", "timeout_ns")),
        ("round", ctypes.c_uint64),
        ("error", INT64),
    )


GroupPointer = ctypes.POINTER(Group)  # keeps its group alive, and so do the arguments that hold it


class ReduceArgs(ctypes.Structure):
    """reduce_args of collectives.c."""

    _fields_ = (("group", GroupPointer), ("x", POINTER), ("bytes", INT64), ("is_bfloat16", INT64))


class GatherArgs(ctypes.Structure):
    """gather_args of collectives.c."""

    _fields_ = (("group", GroupPointer), ("outs", ctypes.POINTER(POINTER)), ("bytes", ctypes.POINTER(INT64)))


class BroadcastArgs(ctypes.Structure):
    """broadcast_args of collectives.c."""

    _fields_ = (("group", GroupPointer), ("x", POINTER), ("bytes", INT64))


class NativeCollectives:
    """The C version. Graphs that hold its collectives must not outlive it: the mapping goes with it."""

    is_recordable = True

    def __init__(self, memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout: float) -> None:
        self._view = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self._rank, self._size = rank, size
        group = Group(self._view.data_ptr(), rank, size, slot_bytes, SPIN_NS, int(timeout * 1e9), 0, 0)
        self._group = ctypes.pointer(group)

    def all_reduce(self, x: torch.Tensor) -> None:
        """See Collectives."""
        _launch("all_reduce", ReduceArgs(self._group, x.data_ptr(), num_bytes(x), x.dtype == torch.bfloat16))

    def gather(self, x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
        """See Collectives."""
        outs = [x, *(new_empty(shape, x.dtype) for shape in shapes[1:])] if self._rank == 0 else [x] * self._size
        pointers = (POINTER * self._size)(*(out.data_ptr() for out in outs))
        sizes = (INT64 * self._size)(*(math.prod(shape) * x.element_size() for shape in shapes))
        _launch("gather", GatherArgs(self._group, pointers, sizes))
        return outs if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> None:
        """See Collectives."""
        _launch("broadcast", BroadcastArgs(self._group, x.data_ptr(), num_bytes(x)))


class TorchCollectives:
    """The torch version."""

    is_recordable = False

    def __init__(self, memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout: float) -> None:
        view = torch.frombuffer(memory, dtype=torch.uint8)
        words = view[: size * HEADER_BYTES].view(torch.int64).view(size, -1).numpy()
        self._rounds, self._sent_bytes = words[:, 0], words[:, 1:3]
        self._slots = view[size * HEADER_BYTES : memory_bytes(size, slot_bytes)].view(size, 2, slot_bytes)
        self._rank, self._size, self._slot_bytes = rank, size, slot_bytes
        self._timeout_ns = int(timeout * 1e9)
        self._round = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """See Collectives."""
        payload = x.view(-1).view(torch.uint8)
        for chunk in self._chunks(payload):
            self._begin()
            self._enter(chunk, payload.numel())
            for peer in range(self._size):
                self._receive(peer, payload.numel())
            slots = self._slots[:, self._round & 1, : chunk.numel()].view(x.dtype)
            total = slots[0].float()
            for peer in range(1, self._size):
                total = total + slots[peer].float()
            chunk.view(x.dtype).copy_(total)

    def gather(self, x: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
        """See Collectives."""
        own = x.view(-1).view(torch.uint8)
        outs = [x, *(x.new_empty(shape) for shape in shapes[1:])] if self._rank == 0 else None
        parts = [out.view(-1).view(torch.uint8) for out in outs or ()]
        for start in range(0, max(map(math.prod, shapes)) * x.element_size(), self._slot_bytes):
            self._begin()
            self._enter(own[start : start + self._slot_bytes] if self._rank else own[:0], own.numel())
            for peer, part in enumerate(parts[1:], 1):
                chunk = part[start : start + self._slot_bytes]
                chunk.copy_(self._receive(peer, part.numel())[: chunk.numel()])
        return outs

    def broadcast(self, x: torch.Tensor) -> None:
        """See Collectives."""
        payload = x.view(-1).view(torch.uint8)
        for chunk in self._chunks(payload):
            self._begin()
            self._enter(chunk[:0] if self._rank else chunk, payload.numel())
            if self._rank:
                chunk.copy_(self._receive(0, payload.numel())[: chunk.numel()])

    def _chunks(self, payload: torch.Tensor) -> list[torch.Tensor]:
        starts = range(0, payload.numel(), self._slot_bytes)
        return [payload[start : start + self._slot_bytes] for start in starts]

    def _begin(self) -> None:
        """Begin a round: our slot of this parity is free once all have entered the round before."""
        for peer in range(self._size):
            self._wait_for(peer)
        self._round += 1

    def _enter(self, chunk: torch.Tensor, sent_bytes: int) -> None:
        parity = self._round & 1
        self._slots[self._rank, parity, : chunk.numel()].copy_(chunk)
        self._sent_bytes[self._rank, parity] = sent_bytes
        self._rounds[self._rank] = self._round

    def _receive(self, peer: int, expected_bytes: int) -> torch.Tensor:
        self._wait_for(peer)
        if self._sent_bytes[peer, self._round & 1] != expected_bytes:
            raise PeerError(peer, late=False)
        return self._slots[peer, self._round & 1]

    def _wait_for(self, peer: int) -> None:
        start = time.monotonic_ns()
        while self._rounds[peer] < self._round:
            waited = time.monotonic_ns() - start
            if waited > self._timeout_ns:
                raise PeerError(peer, late=True)
            if waited > YIELD_NS:
                time.sleep(SLEEP_SECONDS)
            elif waited > SPIN_NS:
                os.sched_yield()


def _launch(name: str, args: ctypes.Structure) -> None:
    try:
        launch(find_function(SOURCE, name), args)
    except OperatorError as error:
        peer = peer_error(error.code)
        if peer is None:
            raise
        raise peer from error
