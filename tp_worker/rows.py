"""What a rank knows of every request row, changed by the batch stream alone and so the same on all ranks.

Arrays are indexed by row; a row that nobody has is `FREE` in `generations`. Page tables are append-only.
"""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.batch_messages import NewReq, PageColumns, ScheduleBatch
from ..common.logprobs import InvalidLogprobs, LogprobReq, check_logprobs
from ..common.messages import POOLINGS, Int32s
from ..common.sampling_params import GREEDY_TEMPERATURE, InvalidParam, check_sampling_params
from .logit_changes import LogitChanges

FREE = -1
NOT_STARTED = -1

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


logger = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """A ScheduleBatch contradicts itself or the rows: the scheduler and the workers disagree, and the server ends."""


class Limits:
    """What rows, positions, pages and token ids must stay below."""

    def __init__(self, *, max_rows: int, context_len: int, vocab_size: int, num_pages: int, page_size: int) -> None:
        self.max_rows = max_rows
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def max_pages_per_row(self) -> int:
        """Pages of a full context; the one on top holds what overlap reserves beyond it."""
        return -(-self.context_len // self.page_size) + 1


class WantedLogprobs(NamedTuple):
    """What a row's request wants; `prompt_len` tells its prompt from its outputs."""

    request: LogprobReq
    prompt_len: int


@dataclass(slots=True)
class PoolingSum:
    """The sum of the hidden states that a row's vector is made of; `num_left` of them are not computed yet."""

    is_mean: bool
    prompt_len: int
    num_left: int
    sum_F: Float32Array = field(default_factory=lambda: np.zeros(1, np.float32))


class Rows:
    """All rows of a rank."""

    def __init__(self, limits: Limits, *, is_sampling: bool = True) -> None:
        """`is_sampling`: of the rank that draws the tokens, which alone knows what changes their logits."""
        num = limits.max_rows
        self.limits = limits
        self.generations: Int32Array = np.full(num, FREE, np.int32)
        self.row_lens: Int32Array = np.zeros(num, np.int32)  # tokens known
        self.kv_lens: Int32Array = np.zeros(num, np.int32)  # positions whose keys and values are computed
        self.input_lens: Int32Array = np.zeros(num, np.int32)
        self.last_tokens: Int64Array = np.zeros(num, np.int64)
        self.num_pages: Int32Array = np.zeros(num, np.int32)
        self.page_table: Int32Array = np.zeros((num, limits.max_pages_per_row), np.int32)
        self.has_error: BoolArray = np.zeros(num, np.bool_)
        self.errors: dict[int, str] = {}  # row -> why all its steps fail until it is freed
        self.input_ids: dict[int, Int32Array] = {}
        self.logprobs: dict[int, WantedLogprobs] = {}  # of the rows that want some
        self.pooling: dict[int, PoolingSum] = {}  # of the rows that want a vector of their prompt
        self.logit_changes = LogitChanges(num, limits.vocab_size) if is_sampling else None
        self.temperatures: Float32Array = np.zeros(num, np.float32)  # 0 is greedy
        self.top_ks: Int64Array = np.zeros(num, np.int64)
        self.top_ps: Float32Array = np.zeros(num, np.float32)
        self.min_ps: Float32Array = np.zeros(num, np.float32)
        self.seeds: Int64Array = np.zeros(num, np.int64)

    def apply(self, batch: ScheduleBatch) -> None:
        """The changes of a batch, top to bottom. BatchError where it cannot be right."""
        for row in read_int32(batch.freed_rows).tolist():
            self._free(row)
        for req in batch.new_reqs:
            self._add(req)
        if len(batch.new_pages) > 1:
            raise BatchError(f"step {batch.step} brings pages of {len(batch.new_pages)} KV groups; there is one")
        for columns in batch.new_pages:
            self._add_pages(columns)

    def fail(self, row: int, message: str) -> None:
        """From now until it is freed, every step of the row is an error."""
        self.has_error[row] = True
        self.errors.setdefault(row, message)

    def _free(self, row: int) -> None:
        self._check_known(np.array([row]), "is freed")
        self.generations[row] = FREE
        self.has_error[row] = False
        self.errors.pop(row, None)
        self.input_ids.pop(row, None)
        self.logprobs.pop(row, None)
        self.pooling.pop(row, None)
        if self.logit_changes is not None:
            self.logit_changes.free(row)

    def _add(self, req: NewReq) -> None:
        row, params = req.row, req.sampling_params
        if not 0 <= row < self.limits.max_rows or self.generations[row] != FREE or req.generation < 0:
            raise BatchError(f"row {row} cannot be given to {req.rid}: it is out of range or in use")
        input_ids = read_int32(req.input_ids)
        self.generations[row] = req.generation
        self.row_lens[row] = self.input_lens[row] = len(input_ids)
        self.kv_lens[row] = NOT_STARTED
        self.num_pages[row] = 0
        problem = self._problem(req, input_ids)
        if problem:
            self.fail(row, problem)
            return
        logger.debug("request %s: row %d, %d tokens", req.rid, row, len(input_ids))
        self.input_ids[row] = input_ids
        if req.logprobs is not None:
            self.logprobs[row] = WantedLogprobs(req.logprobs.resolved(req.prompt_len), req.prompt_len)
        if req.pooling is not None:
            is_mean = req.pooling == "mean"
            self.pooling[row] = PoolingSum(is_mean, req.prompt_len, req.prompt_len if is_mean else 1)
        self.last_tokens[row] = input_ids[-1]
        if self.logit_changes is not None:
            self.logit_changes.add(req, input_ids)
        self.temperatures[row] = 0.0 if params.is_greedy else max(params.temperature, GREEDY_TEMPERATURE)
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.min_ps[row] = params.min_p
        self.seeds[row] = params.seed or 0

    def _problem(self, req: NewReq, input_ids: Int32Array) -> str | None:
        """What is wrong with the request itself: its error, and nobody else's."""
        limits = self.limits
        if not 0 < len(input_ids) <= limits.context_len:
            return f"{len(input_ids)} tokens are known; the context holds 1 to {limits.context_len}"
        if not 0 < req.prompt_len <= len(input_ids):
            return f"prompt_len {req.prompt_len} is not within the {len(input_ids)} known tokens"
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= limits.vocab_size:
            return f"token id {low if low < 0 else high} is not in the vocabulary of {limits.vocab_size}"
        if req.pooling not in {None, *POOLINGS}:
            return f"pooling must be one of {', '.join(POOLINGS)}"
        try:
            check_sampling_params(req.sampling_params, limits.vocab_size)
            if req.logprobs is not None:
                check_logprobs(req.logprobs, req.prompt_len, limits.vocab_size)
        except (InvalidParam, InvalidLogprobs) as error:
            return str(error)
        return None

    def _add_pages(self, columns: PageColumns) -> None:
        rows, counts, page_ids = map(read_int32, (columns.rows, columns.counts, columns.page_ids))
        if len(rows) != len(counts) or (counts < 0).any() or counts.sum() != len(page_ids):
            raise BatchError("the page columns do not fit together")
        self._check_known(rows, "gets pages")
        check_distinct(rows, "page columns")
        bad_ids = (page_ids < 0) | (page_ids >= self.limits.num_pages)
        row_of_id = np.repeat(rows, counts)
        for row in set(row_of_id[bad_ids].tolist()):
            self.fail(row, f"a page id is not below {self.limits.num_pages}")
        for row in rows[self.num_pages[rows] + counts > self.limits.max_pages_per_row].tolist():
            self.fail(row, f"more than the {self.limits.max_pages_per_row} pages of a context")
        index_in_row = np.arange(len(page_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        is_good = ~self.has_error[row_of_id]
        columns_of_ids = (self.num_pages[row_of_id] + index_in_row)[is_good]
        self.page_table[row_of_id[is_good], columns_of_ids] = page_ids[is_good]
        self.num_pages[rows] += counts

    def _check_known(self, rows: NDArray[np.integer], what: str) -> None:
        is_bad = (rows < 0) | (rows >= self.limits.max_rows)
        if is_bad.any() or (self.generations[rows] == FREE).any():
            raise BatchError(f"a row {what} that nobody has: {rows.tolist()}")


def read_int32(packed: Int32s) -> Int32Array:
    """A packed column, without a copy; BatchError if it is not made of whole numbers of four bytes."""
    if len(packed) % 4:
        raise BatchError(f"an int32 column has {len(packed)} bytes")
    return np.frombuffer(packed, np.int32)


def check_distinct(rows: Int32Array, what: str) -> None:
    """BatchError where a row comes twice."""
    if len(set(rows.tolist())) != len(rows):
        raise BatchError(f"{what} name a row twice: {rows.tolist()}")
