"""How a step's operators run: recorded, then run by one call. Without it a small step is mostly Python.

A step is recorded once for each shape: a number of tokens, of requests and of rows that sample. Steps of a known shape
run the same graph on new inputs. What has no C version (CUDA, other types, no compiler) runs operator by operator.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.graph import Arena, Graph, NotRecordable, record
from ..kernels.native import OperatorError, run_nodes
from .communicator import Communicator
from .forward_batch import ForwardBatch

FIRST_ARENA_BYTES = 2**25
MAX_GRAPHS = 256  # those used last stay
MAX_REFUSALS = 4096
FIRST_ROOM = 64
INPUTS = ("token_ids_T", "positions_T", "row_of_T", "page_table_RP", "query_starts", "kv_lens_R", "logits_indices_S")

Shape = tuple[int, int, int]  # tokens, requests, rows that sample

Compute = Callable[[ForwardBatch], list[torch.Tensor] | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    outputs: list[torch.Tensor] | None


class _Inputs:
    """The inputs of all recorded steps, in the same memory: graphs never run at once."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def make_room(self, batch: ForwardBatch) -> bool:
        """Whether a buffer was too small and lies elsewhere now."""
        has_moved = False
        for name in INPUTS:
            x, own = getattr(batch, name), self._buffers.get(name)
            room = [0] * x.dim() if own is None else list(own.shape)
            larger = [old if new <= old else max(FIRST_ROOM, 2 * new) for old, new in zip(room, x.shape, strict=True)]
            if own is None or larger != room:
                self._buffers[name] = x.new_zeros(larger)
                has_moved = True
        return has_moved

    def like(self, batch: ForwardBatch) -> ForwardBatch:
        """The inputs of batch's shape, whose page tables have room to grow."""
        parts: dict[str, Any] = {name: self._buffers[name][: len(getattr(batch, name))] for name in INPUTS}
        return dataclasses.replace(batch, **parts)

    def fill(self, batch: ForwardBatch) -> None:
        """Take the batch's values."""
        for name in INPUTS:
            x = getattr(batch, name)
            self._buffers[name][tuple(map(slice, x.shape))] = x


class DecoderGraphs:
    """Runs `compute`, whose results are good until the next step."""

    def __init__(self, compute: Compute, communicator: Communicator) -> None:
        self._compute = compute
        self._communicator = communicator
        self._arena = Arena(FIRST_ARENA_BYTES)
        self._inputs = _Inputs()
        self._recorded: dict[Shape, _Recorded] = {}
        self._refused: set[Shape] = set()

    def run(self, batch: ForwardBatch) -> list[torch.Tensor] | None:
        """What `compute` gives for this batch."""
        shape = (batch.num_tokens, batch.num_reqs, batch.logits_indices_S.numel())
        if not self._communicator.is_recordable or shape in self._refused:
            return self._compute(batch)
        try:
            recorded = self._find(shape, batch)
        except NotRecordable as error:
            self._refuse(shape, error)
            return self._compute(batch)
        try:
            run_nodes(recorded.graph.nodes())
        except OperatorError as error:
            raise self._communicator.explain(error) from error
        return recorded.outputs

    def _refuse(self, shape: Shape, error: NotRecordable) -> None:
        if not self._refused:
            logger.info("steps run operator by operator: %s", error)
        if len(self._refused) >= MAX_REFUSALS:
            self._refused.clear()
        self._refused.add(shape)

    def _find(self, shape: Shape, batch: ForwardBatch) -> _Recorded:
        """The recorded step of this shape, with the batch's inputs."""
        if self._inputs.make_room(batch):
            self._recorded.clear()
        recorded = self._recorded.pop(shape, None) or self._record(self._inputs.like(batch))
        self._recorded[shape] = recorded
        if len(self._recorded) > MAX_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        self._inputs.fill(batch)
        return recorded

    def _record(self, batch: ForwardBatch) -> _Recorded:
        """Record a step. The results lie in the arena without holding their place in it."""
        while True:
            try:
                with record(self._arena) as graph:
                    outputs = self._compute(batch)
            except MemoryError:
                self._recorded.clear()
                self._arena = Arena(2 * self._arena.num_bytes)
                continue
            return _Recorded(graph, outputs and [self._arena.borrow(x) for x in outputs])
