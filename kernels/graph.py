"""A recorded sequence of C operators, run again and again by one call: the CPU's counterpart of a CUDA graph.

While a graph records, C operators are noted down and not run, and `new_empty` hands out the graph's own memory. A run
reads and writes the same addresses, so tensors that are not made while recording (weights, caches, inputs) must
outlive the graph, and new inputs are copied into them. An operator may note down memory for each of torch's threads,
so a graph runs on no more than there were when it was recorded. torch's own arithmetic can not be recorded: an operator
that would run as torch raises NotRecordable.
"""

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

ALIGNMENT = 64


class NotRecordable(RuntimeError):
    """A step of the recorded function has no C version for its operands here."""


class Node(ctypes.Structure):
    """node of cpu_graph.c."""

    _fields_ = (("operator", ctypes.c_void_p), ("args", ctypes.c_void_p))


class Arena:
    """Memory that graphs share which never run at once. A block is free again when the last tensor on it is gone."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -self._memory.ctypes.data % ALIGNMENT
        self._free = [(start, start + num_bytes)]  # sorted, never adjacent
        self._released: list[tuple[int, int]] = []  # by finalizers, which may run at any time

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the lowest block that is large enough. MemoryError where there is none."""
        self._collect_released()
        num_bytes = math.prod(shape) * dtype.itemsize
        size = max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                view = self._memory[start : start + num_bytes]
                weakref.finalize(view, self._released.append, (start, start + size)).atexit = False
                return torch.from_numpy(view).view(dtype).view(*shape)
        raise MemoryError(f"the graph's memory is too small for {num_bytes} bytes more")

    def borrow(self, x: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor that does not hold it: good until the next graph on this arena runs."""
        start = x.data_ptr() - self._memory.ctypes.data
        view = self._memory[start : start + x.numel() * x.element_size()]
        return torch.from_numpy(view).view(x.dtype).view(x.shape)

    def _collect_released(self) -> None:
        if not self._released:
            return
        released = [self._released.pop() for _ in range(len(self._released))]
        blocks = sorted([*self._free, *released])
        merged = blocks[:1]
        for block in blocks[1:]:
            if block[0] == merged[-1][1]:
                merged[-1] = (merged[-1][0], block[1])
            else:
                merged.append(block)
        self._free = merged


class Graph:
    """Made by `record`; `nodes` grow while it records."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._steps: list[tuple[int, ctypes.Structure]] = []
        self._nodes: ctypes.Array[Node] | None = None

    def add(self, function: int, args: ctypes.Structure) -> None:
        """Note a C operator down."""
        self._steps.append((function, args))

    def nodes(self) -> ctypes.Array[Node]:
        """The steps as the C runner takes them."""
        if self._nodes is None or len(self._nodes) != len(self._steps):
            self._nodes = (Node * len(self._steps))(
                *(Node(function, ctypes.addressof(args)) for function, args in self._steps)
            )
        return self._nodes


class _Recording:
    graph: Graph | None = None


_recording = _Recording()


def recording() -> Graph | None:
    """The graph that records now."""
    return _recording.graph


@contextlib.contextmanager
def record(arena: Arena) -> Iterator[Graph]:
    """Everything inside is recorded into the graph that this gives."""
    if _recording.graph is not None:
        raise RuntimeError("a graph is being recorded already")
    graph = _recording.graph = Graph(arena)
    try:
        yield graph
    finally:
        _recording.graph = None
