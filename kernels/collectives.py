"""All-reduce, gather and broadcast between processes of one host, over shared memory.

Contract: `size` ranks map the same memory of `memory_bytes(size, slot_bytes)` zeroed bytes and enter the same
collectives in the same order. `all_reduce` sums float32 or bfloat16 in float32, in rank order, so that every rank
obtains the same bits. `gather` brings rank r's bytes into rank 0's `outs[r]`; `broadcast` brings rank 0's to all.
Raises PeerError where a rank does not arrive within the timeout or sends another number of bytes than expected.

Method: each rank owns a header and two slots. A payload goes in rounds of at most a slot; round s uses slot s & 1.
A rank fills its slot, then raises its round counter (release); readers wait for it (acquire). Whoever has entered round
s has done reading round s - 1, so before filling a slot for round s + 1 it is enough that all have entered round s:
no second barrier. Waiting spins for 20 us at most, then gives the core away, because ranks may outnumber cores.

Two versions: C (`collectives.c`), and torch, which relies on x86's ordering of stores.
"""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from .backend import load_library

HEADER_BYTES = 256
SPIN_NS = 20_000
YIELD_NS = 2_000_000
SLEEP_SECONDS = 50e-6
LATE, DISAGREES = 1, 1001
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


class PeerError(RuntimeError):
    """`peer` did not arrive in time (`late`) or does not agree on what is sent."""

    def __init__(self, peer: int, *, late: bool) -> None:
        super().__init__(f"rank {peer} {'did not arrive in time' if late else 'sends something else'}")
        self.peer = peer


class Collectives(Protocol):
    """Both versions; tensors are contiguous and on the CPU."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over the ranks, in place."""

    def gather(self, outs: Sequence[torch.Tensor]) -> None:
        """Rank 0: fill `outs[r]` for r > 0. Others: send `outs[rank]`; of the rest only the sizes count."""

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
    return is_ordered() or native_library() is not None


def open_collectives(memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout: float) -> Collectives:
    """The C version where it can be built, else torch's; `timeout` in seconds."""
    library = native_library()
    if library is not None:
        return NativeCollectives(library, memory, rank, size, slot_bytes, timeout)
    return TorchCollectives(memory, rank, size, slot_bytes, timeout)


def native_library() -> ctypes.CDLL | None:
    """collectives.c, built; None where there is no compiler or the torch backend is forced."""
    return load_library("collectives.c")


def num_bytes(x: torch.Tensor) -> int:
    """Payload of a tensor."""
    return x.numel() * x.element_size()


class Group(ctypes.Structure):
    """group_t of collectives.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("round", ctypes.c_uint64),
    )


class NativeCollectives:
    """The C version."""

    def __init__(
        self, library: ctypes.CDLL, memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout: float
    ) -> None:
        self._view = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self._group = Group(self._view.data_ptr(), rank, size, slot_bytes, SPIN_NS, int(timeout * 1e9), 0)
        self._reference = ctypes.byref(self._group)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._all_reduce = library.millstream_all_reduce
        self._all_reduce.argtypes = (pointer, pointer, number, ctypes.c_int)
        self._gather = library.millstream_gather
        self._gather.argtypes = (pointer, pointer * size, number * size)
        self._broadcast = library.millstream_broadcast
        self._broadcast.argtypes = (pointer, pointer, number)
        self._pointers, self._sizes = pointer * size, number * size

    def all_reduce(self, x: torch.Tensor) -> None:
        """See Collectives."""
        _check(self._all_reduce(self._reference, x.data_ptr(), num_bytes(x), DTYPE_CODES[x.dtype]))

    def gather(self, outs: Sequence[torch.Tensor]) -> None:
        """See Collectives."""
        pointers = self._pointers(*(out.data_ptr() for out in outs))
        _check(self._gather(self._reference, pointers, self._sizes(*(num_bytes(out) for out in outs))))

    def broadcast(self, x: torch.Tensor) -> None:
        """See Collectives."""
        _check(self._broadcast(self._reference, x.data_ptr(), num_bytes(x)))


class TorchCollectives:
    """The torch version."""

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

    def gather(self, outs: Sequence[torch.Tensor]) -> None:
        """See Collectives."""
        payloads = [out.view(-1).view(torch.uint8) for out in outs]
        most = max(payload.numel() for payload in payloads)
        for start in range(0, most, self._slot_bytes):
            self._begin()
            own = payloads[self._rank]
            self._enter(own[start : start + self._slot_bytes] if self._rank else own[:0], own.numel())
            for peer in range(1, self._size if self._rank == 0 else 1):
                part = payloads[peer][start : start + self._slot_bytes]
                part.copy_(self._receive(peer, payloads[peer].numel())[: part.numel()])

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


def _check(code: int) -> None:
    if code >= DISAGREES:
        raise PeerError(code - DISAGREES, late=False)
    if code >= LATE:
        raise PeerError(code - LATE, late=True)
