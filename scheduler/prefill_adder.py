"""Which prompt tokens join the next step: SGLang's PrefillAdder with its three budgets.

A step carries the running decodes first (they have their pages already), then prefill chunks within

    rem_total_tokens   KV slots that are free or evictable, less what running and admitted requests will still need
    rem_chunk_tokens   tokens a step may compute (`--chunked-prefill-size`), less the decode rows; None: no chunking
    rem_input_tokens   tokens a step may admit (`--max-prefill-tokens`), less the decode rows

Memory is asked anew at each use, because locking a prefix and taking pages change it. Where SGLang charges whole pages
to the two step budgets we charge tokens: the pages are taken at once, so the memory budget knows them.
"""

from collections.abc import Collection
from enum import Enum, auto

from .page_pool import PagePool
from .req import Range, Req

CLIP_MAX_NEW_TOKENS = 4096  # bounds the estimate of an output, not the output


class AddReqResult(Enum):
    """May the next candidate be tried?"""

    CONTINUE = auto()
    NO_TOKEN = auto()  # the KV cache is full
    OTHER = auto()  # this step's budgets are used up


class PrefillAdder:
    """Built for one step; `can_run_list` is what it admitted, `new_chunked_req` the one that it admitted in part."""

    def __init__(
        self,
        pool: PagePool,
        running_batch: Collection[Req],
        new_token_ratio: float,
        *,
        rem_input_tokens: int,
        rem_chunk_tokens: int | None,
        num_mixed_decode_tokens: int = 0,
        prefill_max_requests: int,
    ) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        # However many decodes run, one page of prompt may join: prefill is slowed down by them, never stopped.
        self.rem_input_tokens = max(rem_input_tokens - num_mixed_decode_tokens, self.page_size)
        self.rem_chunk_tokens = (
            None if rem_chunk_tokens is None else max(rem_chunk_tokens - num_mixed_decode_tokens, self.page_size)
        )
        self.prefill_max_requests = prefill_max_requests
        self.rem_total_token_offset = sum(_expected_new_tokens(req, new_token_ratio) for req in running_batch)
        self.is_alone = not running_batch
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None

    @property
    def rem_total_tokens(self) -> float:
        """KV slots that nobody is expected to need."""
        return self.pool.num_available_pages * self.page_size - self.rem_total_token_offset

    def budget_state(self) -> AddReqResult:
        """The verdict on the next candidate."""
        if self.pool.num_available_pages == 0 or (self.rem_total_tokens <= 0 and not self.is_alone):
            return AddReqResult.NO_TOKEN
        if self.rem_input_tokens <= 0 or (self.rem_chunk_tokens is not None and self.rem_chunk_tokens <= 0):
            return AddReqResult.OTHER
        if len(self.can_run_list) >= self.prefill_max_requests:
            return AddReqResult.OTHER
        return AddReqResult.CONTINUE

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Go on with the request that is computed in part, as far as budgets and pages reach.

        The memory estimate does not stop it: it holds pages already, and gives them back only by going on.
        """
        start, known_len = req.kv_allocated_len, len(req.token_ids)
        num_slots = (len(req.page_ids) + self.pool.num_available_pages) * self.page_size
        end = self._chunk_end(start, min(known_len, num_slots))
        if end < known_len:
            self.new_chunked_req = req
        if end <= start:
            return AddReqResult.NO_TOKEN if num_slots <= start else AddReqResult.OTHER
        self._extend(req, start, end)
        return self.budget_state()

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request (looked up in the tree already), whole or its first chunk, if the budgets allow.

        The verdict is about the next candidate; whether this one got in, `can_run_list` tells.
        """
        if self.budget_state() is not AddReqResult.CONTINUE:
            return self.budget_state()
        assert req.last_node is not None
        tree_cache = self.pool.tree_cache
        tree_cache.inc_lock_ref(req.last_node)  # from here on its own prefix does not count as evictable
        start, known_len = req.kv_allocated_len, len(req.token_ids)
        verdict, end = self._select_end(req, start, known_len)
        if verdict is not AddReqResult.CONTINUE:
            tree_cache.dec_lock_ref(req.last_node)
            return verdict
        self._extend(req, start, end)
        if end < known_len:
            self.new_chunked_req = req
        return self.budget_state()

    def _select_end(self, req: Req, start: int, known_len: int) -> tuple[AddReqResult, int]:
        """How far the candidate is computed in this step, or why it has to wait."""
        total_tokens = known_len - start + _clipped_new_tokens(req) + self.page_size
        if total_tokens >= self.rem_total_tokens and not self.is_alone:
            return AddReqResult.NO_TOKEN, start
        if self.rem_chunk_tokens is None:
            if self.can_run_list and known_len - start > self.rem_input_tokens:
                return AddReqResult.OTHER, start
            end = known_len
        else:
            end = self._chunk_end(start, known_len)
            if end <= start or (end < known_len and self.new_chunked_req is not None):
                return AddReqResult.OTHER, start  # only one request may be computed in part
        if self.pool.num_pages_for(end) - len(req.page_ids) > self.pool.num_available_pages:
            return AddReqResult.NO_TOKEN, start
        return AddReqResult.CONTINUE, end

    def _chunk_end(self, start: int, limit: int) -> int:
        """The end of a chunk from `start`: `limit`, or the last page boundary within the step's budgets."""
        if self.rem_chunk_tokens is None:
            return limit
        budget_end = start + min(self.rem_chunk_tokens, self.rem_input_tokens)
        return limit if limit <= budget_end else budget_end // self.page_size * self.page_size

    def _extend(self, req: Req, start: int, end: int) -> None:
        """Take the pages and charge the budgets. What is computed in part reserves no output yet."""
        grown = self.pool.grow(req, end)
        assert grown, "pages were counted before they were taken"
        req.extend_range = Range(start, end)
        self.can_run_list.append(req)
        self.is_alone = False
        self.rem_input_tokens -= end - start
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= end - start
            assert self.rem_chunk_tokens >= 0
        if end == len(req.token_ids):
            self.rem_total_token_offset += _clipped_new_tokens(req) + self.page_size


def _clipped_new_tokens(req: Req) -> int:
    """Output tokens that are still to come, clipped."""
    return min(req.num_left_to_plan, CLIP_MAX_NEW_TOKENS)


def _expected_new_tokens(req: Req, new_token_ratio: float) -> float:
    """The share of them that a running request is expected to use; all of them when nothing but length ends it."""
    ratio = 1.0 if req.message.sampling_params.ignore_eos else new_token_ratio
    return _clipped_new_tokens(req) * ratio
