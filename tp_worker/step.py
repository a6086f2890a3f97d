"""The rows of one step: read from the batch, checked against what every rank knows, made into a ForwardBatch.

Everything here is a function of the batch stream alone, so that all ranks refuse the same rows and enter the same
collectives. N rows of the step, extend rows first; R of them pass the checks; S of those sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.batch_messages import ScheduleBatch
from .forward_batch import ForwardBatch
from .rows import FREE, NOT_STARTED, BatchError, BoolArray, Int32Array, Int64Array, Rows, check_distinct, read_int32


class Chunk(NamedTuple):
    """The tokens of an extend row: its positions [start, end), which are the step's tokens from `first` on."""

    row: int
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class Step:
    """Good row i computes positions [starts_R[i], ends_R[i]), and samples where that reaches its last known token."""

    rows_N: Int32Array
    is_good_N: BoolArray
    errors: dict[int, str]  # row -> message, for every row that is not good
    rows_R: Int32Array
    starts_R: Int32Array
    ends_R: Int32Array
    num_extend: int  # of the R rows
    is_sampling_R: BoolArray
    sampling_rows_S: Int32Array

    def chunks(self) -> Iterator[Chunk]:
        """The good extend rows, in the order of the step's tokens."""
        extend, first = slice(0, self.num_extend), 0
        columns = (self.rows_R[extend].tolist(), self.starts_R[extend].tolist(), self.ends_R[extend].tolist())
        for row, start, end in zip(*columns, strict=True):
            yield Chunk(row, start, end, first)
            first += end - start


def read_step(rows: Rows, batch: ScheduleBatch) -> Step:
    """Read and check the columns of a batch. BatchError where they cannot be right; bad rows become errors."""
    rows_N, starts_N, ends_N, num_extend = _read_columns(rows, batch)
    is_known_N = _is_known(rows, rows_N)
    is_good_N = is_known_N & _is_in_order(rows, np.where(is_known_N, rows_N, 0), starts_N, ends_N, num_extend)
    errors = {}
    for i in np.flatnonzero(~is_good_N).tolist():
        row = int(rows_N[i])
        errors[row] = f"row {row} is not in use"
        if is_known_N[i]:
            rows.fail(row, _explain(rows, row, int(starts_N[i]), int(ends_N[i])))
            errors[row] = rows.errors[row]
    rows_R, starts_R, ends_R = (
        (rows_N, starts_N, ends_N) if not errors else _select(is_good_N, rows_N, starts_N, ends_N)
    )
    is_sampling_R = np.asarray(ends_R == rows.row_lens[rows_R])
    return Step(
        rows_N=rows_N,
        is_good_N=is_good_N,
        errors=errors,
        rows_R=rows_R,
        starts_R=starts_R,
        ends_R=ends_R,
        num_extend=int(is_good_N[:num_extend].sum()),
        is_sampling_R=is_sampling_R,
        sampling_rows_S=rows_R[is_sampling_R],
    )


def build_forward_batch(
    rows: Rows, step: Step, device: torch.device, hidden_indices: Sequence[Int64Array] = ()
) -> ForwardBatch:
    """The tensors of a step's good rows, of which there must be at least one.

    The hidden states of the tokens `hidden_indices` are wanted, one array after the other.
    """
    query_lens_R = step.ends_R - step.starts_R
    query_starts = np.zeros(len(query_lens_R) + 1, np.int32)
    np.cumsum(query_lens_R, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    row_of_T = np.repeat(np.arange(len(query_lens_R), dtype=np.int32), query_lens_R)
    positions_T = np.arange(num_tokens, dtype=np.int32) + (step.starts_R - query_starts[:-1])[row_of_T]
    max_kv_len = int(step.ends_R.max())
    num_pages = -(-max_kv_len // rows.limits.page_size)

    def upload(array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return ForwardBatch(
        token_ids_T=upload(_token_ids(rows, step)),
        positions_T=upload(positions_T),
        row_of_T=upload(row_of_T),
        page_table_RP=upload(rows.page_table[:, :num_pages][step.rows_R]),
        query_starts=upload(query_starts),
        kv_lens_R=upload(step.ends_R),
        logits_indices_S=upload((query_starts[1:] - 1)[step.is_sampling_R].astype(np.int64)),
        num_tokens=num_tokens,
        num_reqs=len(query_lens_R),
        max_query_len=int(query_lens_R.max()),
        max_kv_len=max_kv_len,
        hidden_indices_N=upload(np.concatenate(hidden_indices)) if hidden_indices else None,
    )


def _read_columns(rows: Rows, batch: ScheduleBatch) -> tuple[Int32Array, Int32Array, Int32Array, int]:
    """Rows, first positions and ends of all rows of the step, and how many of them extend."""
    if batch.decode_width != 1:
        raise BatchError(f"step {batch.step} wants {batch.decode_width} tokens a decode row; this worker makes 1")
    extend_rows, starts, ends = map(read_int32, (batch.extend_rows, batch.extend_starts, batch.extend_ends))
    decode_rows = read_int32(batch.decode_rows)
    if not len(extend_rows) == len(starts) == len(ends):
        raise BatchError(f"step {batch.step}: the extend columns have different lengths")
    rows_N = np.concatenate((extend_rows, decode_rows))
    check_distinct(rows_N, f"step {batch.step}'s columns")
    decode_ends = rows.row_lens[np.where(_is_known(rows, decode_rows), decode_rows, 0)]
    return rows_N, np.concatenate((starts, decode_ends - 1)), np.concatenate((ends, decode_ends)), len(extend_rows)


def _token_ids(rows: Rows, step: Step) -> Int64Array:
    chunks = [rows.input_ids[chunk.row][chunk.start : chunk.end] for chunk in step.chunks()]
    return np.concatenate((*chunks, rows.last_tokens[step.rows_R[step.num_extend :]]), dtype=np.int64)


def _select(mask: BoolArray, *columns: Int32Array) -> list[Int32Array]:
    return [column[mask] for column in columns]


def _is_known(rows: Rows, numbers: Int32Array) -> BoolArray:
    in_range = (numbers >= 0) & (numbers < rows.limits.max_rows)
    return np.asarray(in_range & (rows.generations[np.where(in_range, numbers, 0)] != FREE))


def _is_in_order(
    rows: Rows, rows_N: Int32Array, starts_N: Int32Array, ends_N: Int32Array, num_extend: int
) -> BoolArray:
    """Whether a row may compute these positions now; a new row may start anywhere, on top of cached pages."""
    kv_lens_N, extend = rows.kv_lens[rows_N], slice(0, num_extend)
    follows_N = starts_N == kv_lens_N
    follows_N[extend] |= kv_lens_N[extend] == NOT_STARTED
    follows_N[extend] &= ends_N[extend] <= rows.input_lens[rows_N[extend]]
    has_room_N = (ends_N <= rows.num_pages[rows_N] * rows.limits.page_size) & (ends_N <= rows.limits.context_len)
    return np.asarray(follows_N & has_room_N & (starts_N >= 0) & (starts_N < ends_N) & ~rows.has_error[rows_N])


def _explain(rows: Rows, row: int, start: int, end: int) -> str:
    """Why a known row may not compute [start, end)."""
    limits, num_slots = rows.limits, int(rows.num_pages[row]) * rows.limits.page_size
    if end > num_slots:
        return f"position {end - 1} has no page: the row has {num_slots} slots"
    if end > limits.context_len:
        return f"position {end - 1} is beyond the context of {limits.context_len} tokens"
    known, computed = int(rows.row_lens[row]), int(rows.kv_lens[row])
    return f"positions [{start}, {end}) do not follow: {known} tokens are known and {computed} are computed"
