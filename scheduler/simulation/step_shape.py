"""The composition of a step, read from the batch stream: what a cost model needs to know of it.

Array names carry shape letters: N rows of a step (extend rows first, then decode rows), of which the first E extend.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...common.batch_messages import ScheduleBatch

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class StepShape(NamedTuple):
    """Totals over the rows of a step.

    A (query, key) pair is a query token and a token that it attends to, itself included; KV tokens are those that the
    rows read, each once a row. For decode rows both are the same number.
    """

    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_prefill_kv_tokens: int = 0
    num_decode_rows: int = 0
    num_decode_kv_tokens: int = 0
    num_samples: int = 0

    @property
    def kind(self) -> str:
        """prefill, decode or mixed."""
        if not self.num_decode_rows:
            return "prefill"
        return "mixed" if self.num_prefill_rows else "decode"


class StepPlan(NamedTuple):
    """The rows of a step, and which of them sample."""

    rows_N: Int32Array
    num_extends: int
    samples_N: BoolArray
    shape: StepShape


class RowLengths:
    """How many tokens each row knows, followed through the batch stream as a worker does."""

    def __init__(self, num_rows: int) -> None:
        self.lens = np.zeros(num_rows, np.int64)

    def begin(self, batch: ScheduleBatch) -> StepPlan:
        """Take the new rows, and read what the step computes; the steps before it must have ended."""
        for new_req in batch.new_reqs:
            self.lens[new_req.row] = len(new_req.input_ids) // 4
        rows_E, decode_rows = read_int32(batch.extend_rows), read_int32(batch.decode_rows)
        num_decode_kv_tokens = int(self.lens[decode_rows].sum())
        if not len(rows_E):
            num_decodes = len(decode_rows)
            samples_N = np.ones(num_decodes, np.bool_)
            shape = StepShape(0, 0, 0, 0, num_decodes, num_decode_kv_tokens, num_decodes)
            return StepPlan(decode_rows, 0, samples_N, shape)
        starts_E, ends_E = read_int32(batch.extend_starts).astype(np.int64), read_int32(batch.extend_ends)
        samples_E = ends_E == self.lens[rows_E]
        shape = StepShape(
            num_prefill_rows=len(rows_E),
            num_prefill_tokens=int((ends_E - starts_E).sum()),
            num_prefill_pairs=int((_pairs(ends_E.astype(np.int64)) - _pairs(starts_E)).sum()),
            num_prefill_kv_tokens=int(ends_E.sum()),
            num_decode_rows=len(decode_rows),
            num_decode_kv_tokens=num_decode_kv_tokens,
            num_samples=int(samples_E.sum()) + len(decode_rows),
        )
        rows_N = np.concatenate((rows_E, decode_rows))
        samples_N = np.concatenate((samples_E, np.ones(len(decode_rows), np.bool_)))
        return StepPlan(rows_N, len(rows_E), samples_N, shape)

    def end(self, rows_N: Int32Array, lens_N: Int32Array | Int64Array) -> None:
        """The step has ended, and its rows know so many tokens now."""
        self.lens[rows_N] = lens_N


def read_int32(column: bytes) -> Int32Array:
    """A packed column of a message, without a copy."""
    return np.frombuffer(column, np.int32)


def _pairs(lens: Int64Array) -> Int64Array:
    """(query, key) pairs of the first `lens` tokens of a row: 1 + 2 + ... + lens."""
    return lens * (lens + 1) // 2
