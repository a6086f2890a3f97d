"""How a step's operators run: recorded, then run by one call. Without it a small step is mostly Python.

A decode step of R requests is recorded once and run again with new inputs; other steps are recorded each time, because
their shapes hardly ever come back. What has no C version (CUDA, other types, no compiler) runs operator by operator.
R requests, P pages of the longest page table.
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
MAX_GRAPHS = 256

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
        self._decode: dict[int, _Recorded] = {}
        self._has_told = False

    def run(self, batch: ForwardBatch) -> list[torch.Tensor] | None:
        """What `compute` gives for this batch."""
        if not self._communicator.is_recordable:
            return self._compute(batch)
        try:
            recorded = self._find_decode(batch) if _is_pure_decode(batch) else self._record(batch)
        except NotRecordable as error:
            if not self._has_told:
                logger.info("steps run operator by operator: %s", error)
                self._has_told = True
            return self._compute(batch)
        try:
            run_nodes(recorded.graph.nodes())
        except OperatorError as error:
            raise self._communicator.explain(error) from error
        return recorded.outputs

    def _find_decode(self, batch: ForwardBatch) -> _Recorded:
        """The recorded decode step of as many requests, with this batch's inputs."""
        recorded = self._decode.get(batch.num_reqs)
        if recorded is None or recorded.batch.page_table_RP.shape[1] < batch.page_table_RP.shape[1]:
            recorded = self._record(_own_inputs(batch))
            if len(self._decode) >= MAX_GRAPHS:
                self._decode.clear()
            self._decode[batch.num_reqs] = recorded
        inputs = recorded.batch
        for name in ("token_ids_T", "positions_T", "kv_lens_R"):
            getattr(inputs, name).copy_(getattr(batch, name))
        inputs.page_table_RP[:, : batch.page_table_RP.shape[1]] = batch.page_table_RP
        return recorded

    def _record(self, batch: ForwardBatch) -> _Recorded:
        """Record one step. The results stay in the arena without holding their place in it."""
        while True:
            try:
                with record(self._arena) as graph:
                    outputs = self._compute(batch)
            except MemoryError:
                self._decode.clear()
                self._arena = Arena(2 * self._arena.num_bytes)
                continue
            return _Recorded(graph, batch, outputs and [self._arena.borrow(x) for x in outputs])


def _is_pure_decode(batch: ForwardBatch) -> bool:
    return batch.is_decode and batch.logits_indices_S.numel() == batch.num_tokens == batch.num_reqs


def _own_inputs(batch: ForwardBatch) -> ForwardBatch:
    """Inputs for later steps of as many requests: tables with room for twice the pages."""
    num_reqs, num_pages = batch.page_table_RP.shape
    return dataclasses.replace(
        batch,
        token_ids_T=batch.token_ids_T.clone(),
        positions_T=batch.positions_T.clone(),
        kv_lens_R=batch.kv_lens_R.clone(),
        page_table_RP=batch.page_table_RP.new_zeros((num_reqs, 2 * num_pages)),
    )
