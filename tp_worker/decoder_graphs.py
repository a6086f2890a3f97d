"""How a step's operators run: recorded, then run by one call. Without it a small step is mostly Python.

A step is recorded once for each shape: a number of tokens, of requests and of rows that sample. Steps of a known shape
run the same graph on new inputs. What has no C version (CUDA, other types, no compiler) runs operator by operator.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels.graph import Arena, Graph, NotRecordable, record
from ..kernels.native import OperatorError, run_nodes
from .communicator import Communicator
from .forward_batch import ForwardBatch

FIRST_ARENA_BYTES = 2**25
MAX_GRAPHS = 256  # those used last stay
MAX_REFUSALS = 4096

Shape = tuple[int, int, int]  # tokens, requests, rows that sample

Compute = Callable[[ForwardBatch], list[torch.Tensor] | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    batch: ForwardBatch  # the inputs that it reads
    outputs: list[torch.Tensor] | None


class DecoderGraphs:
    """Runs `compute`, whose results are good until the next step."""

    def __init__(self, compute: Compute, communicator: Communicator) -> None:
        self._compute = compute
        self._communicator = communicator
        self._arena = Arena(FIRST_ARENA_BYTES)
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
        recorded = self._recorded.pop(shape, None)
        if recorded is None or recorded.batch.page_table_RP.shape[1] < batch.page_table_RP.shape[1]:
            recorded = self._record(_own_inputs(batch))
        self._recorded[shape] = recorded
        if len(self._recorded) > MAX_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        _copy_inputs(recorded.batch, batch)
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
            return _Recorded(graph, batch, outputs and [self._arena.borrow(x) for x in outputs])


def _own_inputs(batch: ForwardBatch) -> ForwardBatch:
    """Inputs for this and later steps of the shape: page tables have room to grow."""
    num_reqs, num_pages = batch.page_table_RP.shape
    return dataclasses.replace(
        batch,
        token_ids_T=torch.empty_like(batch.token_ids_T),
        positions_T=torch.empty_like(batch.positions_T),
        row_of_T=torch.empty_like(batch.row_of_T),
        page_table_RP=batch.page_table_RP.new_zeros((num_reqs, 2 * num_pages)),
        query_starts=torch.empty_like(batch.query_starts),
        kv_lens_R=torch.empty_like(batch.kv_lens_R),
        logits_indices_S=torch.empty_like(batch.logits_indices_S),
    )


def _copy_inputs(own: ForwardBatch, batch: ForwardBatch) -> None:
    own.token_ids_T.copy_(batch.token_ids_T)
    own.positions_T.copy_(batch.positions_T)
    own.row_of_T.copy_(batch.row_of_T)
    own.page_table_RP[:, : batch.page_table_RP.shape[1]] = batch.page_table_RP
    own.query_starts.copy_(batch.query_starts)
    own.kv_lens_R.copy_(batch.kv_lens_R)
    own.logits_indices_S.copy_(batch.logits_indices_S)
