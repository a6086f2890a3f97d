"""Which prompt tokens join the next step: SGLang's PrefillAdder with its three budgets.

A step carries the running decodes first (they have their pages already), then prefill chunks within

    rem_total_tokens   KV slots that are free or evictable, less what running and admitted requests will still need
    rem_chunk_tokens   tokens a step may compute (`--chunked-prefill-size`), less the decode rows; None: no chunking.
                       An automatic size counts a token the more the later it is in its prompt
    rem_input_tokens   tokens a step may admit (`--max-prefill-tokens`), less the decode rows

The step budgets are charged whole pages. Memory is asked anew at each use, because locking a prefix and taking pages
change it. Pages of requests that have ended, or end with the steps in flight, come back by themselves: where they would
do, the verdict is OTHER and not NO_TOKEN.
"""

import math
from collections.abc import Collection
from enum import Enum, auto
from itertools import chain

from .memory_forecast import Holder, MemoryForecast, num_freed_pages
from .page_pool import PagePool
from .radix_tree import TreeNode
from .req import Range, Req

CLIP_MAX_NEW_TOKENS = 4096  # bounds the estimate of an output, not the output


class AddReqResult(Enum):
    """May the next candidate be tried?"""

    CONTINUE = auto()
    NO_TOKEN = auto()  # the KV cache is full
    OTHER = auto()  # this step's budgets are used up, or memory is on its way back


class PrefillAdder:
    """Built for one step; `can_run_list` is what it admitted, `new_chunked_req` the one that it admitted in part.

    `why` and `numbers` explain the last refusal.
    """

    def __init__(
        self,
        pool: PagePool,
        running_batch: Collection[Req],
        new_token_ratio: float,
        *,
        rem_input_tokens: int,
        rem_chunk_tokens: float | None,
        attention_len: float = math.inf,
        num_mixed_decode_tokens: int = 0,
        prefill_max_requests: int,
        ending: Collection[Req] = (),
    ) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        # However many decodes run, one page of prompt may join: prefill is slowed down by them, never stopped.
        self.rem_input_tokens = max(rem_input_tokens - num_mixed_decode_tokens, self.page_size)
        self.rem_chunk_tokens = (
            None if rem_chunk_tokens is None else max(rem_chunk_tokens - num_mixed_decode_tokens, self.page_size)
        )
        self.prefill_max_requests = prefill_max_requests
        self.is_alone = not running_batch
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None
        self.why = ""
        self.numbers: dict[str, float] = {}

        self._attention_len = attention_len
        self._running_batch = running_batch
        self._ending = ending
        self._new_token_ratio = new_token_ratio
        self._chunk_tokens = int(min(self.rem_input_tokens, self.rem_chunk_tokens or self.rem_input_tokens))
        self._running_reserve: float | None = None  # not summed up before somebody asks
        self._admitted_reserve = 0
        self._is_clipped = False
        self._forecast: MemoryForecast | None = None

    # ---- budgets -----------------------------------------------------------------------------------------------------

    @property
    def rem_total_tokens(self) -> float:
        """KV slots that nobody is expected to need; 0 where more is expected than there is."""
        return max(0.0, self.memory_left)

    @property
    def memory_left(self) -> float:
        """Available KV slots less those that running and admitted requests are expected to need."""
        if self._running_reserve is None:
            self._running_reserve = self._sum_running_reserve()
        return self.pool.num_available_pages * self.page_size - self._running_reserve - self._admitted_reserve

    @property
    def pending_tokens(self) -> int:
        """KV slots that come back with the steps in flight: of ended requests, and of those whose last token is planned."""
        locks_left: dict[TreeNode, int] = {}
        leaving = chain(self._ending, (req for req in self._running_batch if req.num_left_to_plan == 0))
        return sum(num_freed_pages(req, locks_left) for req in leaving) * self.page_size

    def budget_state(self) -> AddReqResult:
        """The verdict on the next candidate."""
        if self.pool.num_available_pages == 0 or (self.memory_left <= 0 and not self.is_alone):
            return self._no_memory(1, max(0.0, -self.memory_left))
        return self.step_budget_state()

    def step_budget_state(self) -> AddReqResult:
        """The verdict on the next candidate as far as it is not about memory."""
        if len(self.can_run_list) >= self.prefill_max_requests:
            return self._refuse("rows", rows=self.prefill_max_requests)
        if self.rem_chunk_tokens is not None and self.rem_chunk_tokens < self.page_size:
            return self._refuse("chunk budget", rem_chunk_tokens=int(self.rem_chunk_tokens))
        if self.rem_input_tokens <= 0:
            return self._refuse("input budget", rem_input_tokens=0)
        return AddReqResult.CONTINUE

    def ceil_paged_tokens(self, num_tokens: int) -> int:
        """`num_tokens` in whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size

    # ---- admission ---------------------------------------------------------------------------------------------------

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Go on with the request that is computed in part, as far as budgets and pages reach.

        The memory estimate does not stop it: it holds pages already, and gives them back only by going on.
        """
        self.is_alone = False
        start, known_len = req.kv_allocated_len, len(req.token_ids)
        num_slots = (len(req.page_ids) + self.pool.num_available_pages) * self.page_size
        end = self._chunk_end(start, min(known_len, num_slots))
        if end < known_len:
            self.new_chunked_req = req
        if end <= start or not self.pool.grow(req, end):
            self.new_chunked_req = req
            return self._no_memory(self.page_size, 0.0)
        self._charge(req, start, end)
        return self.budget_state()

    def has_admitted(self, req: Req) -> bool:
        """Whether the last one that was tried got in."""
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request (looked up in the tree already), whole or its first chunk, if the budgets allow.

        The verdict is about the next candidate; whether this one got in, `can_run_list` tells.
        """
        verdict = self.step_budget_state()
        if verdict is not AddReqResult.CONTINUE:
            return verdict
        assert req.last_node is not None
        tree_cache = self.pool.tree_cache
        tree_cache.inc_lock_ref(req.last_node)  # from here on its own prefix does not count as evictable
        start, known_len = req.kv_allocated_len, len(req.token_ids)
        verdict, end = self._select_end(req, start, known_len)
        if verdict is AddReqResult.CONTINUE and not self.pool.grow(req, end):
            verdict = self._refuse_for_memory(end - start, 0.0)
        if verdict is not AddReqResult.CONTINUE:
            tree_cache.dec_lock_ref(req.last_node)
            return verdict
        if end < known_len:
            self.new_chunked_req = req
        self._charge(req, start, end)
        return self.budget_state()

    def _select_end(self, req: Req, start: int, known_len: int) -> tuple[AddReqResult, int]:
        """How far the candidate is computed in this step, or why it has to wait."""
        if not self.is_alone:
            verdict = self._memory_verdict(req, known_len - start)
            if verdict is not AddReqResult.CONTINUE:
                return verdict, start
        input_tokens = self.ceil_paged_tokens(known_len - start)
        if self.rem_chunk_tokens is None and self.can_run_list and input_tokens >= self.rem_input_tokens:
            return self._refuse("input budget", need=input_tokens, rem_input_tokens=self.rem_input_tokens), start
        end = self._chunk_end(start, known_len)
        if end <= start or (end < known_len and self.new_chunked_req is not None):
            # only one request may be computed in part
            rem_tokens = int(self.rem_chunk_tokens or 0)
            return self._refuse("chunk budget", need=input_tokens, rem_chunk_tokens=rem_tokens), start
        num_lacking_pages = self.pool.num_pages_for(end) - len(req.page_ids) - self.pool.num_available_pages
        if num_lacking_pages > 0:
            return self._no_memory(end - start, num_lacking_pages * self.page_size - 1), start
        return AddReqResult.CONTINUE, end

    def _chunk_end(self, start: int, limit: int) -> int:
        """The end of a chunk from `start`: `limit`, or the last page boundary within the step's budgets."""
        if self.rem_chunk_tokens is None:
            return limit
        rem_tokens = min(self._num_tokens_within(self.rem_chunk_tokens, start), self.rem_input_tokens)
        if not self.can_run_list:
            rem_tokens = max(rem_tokens, self.page_size)  # the first row of a step always gets on
        if self.ceil_paged_tokens(limit - start) <= rem_tokens:
            return limit
        return (start + rem_tokens) // self.page_size * self.page_size

    def _weight(self, start: int, num_tokens: int) -> float:
        """What `num_tokens` from position `start` count."""
        return num_tokens * (1 + (start + num_tokens / 2) / self._attention_len)

    def _num_tokens_within(self, weight: float, start: int) -> int:
        """The inverse: how many tokens from position `start` count at most `weight`."""
        first = 1 + start / self._attention_len
        return int(2 * weight / (first + math.sqrt(first * first + 2 * weight / self._attention_len)))

    def _charge(self, req: Req, start: int, end: int) -> None:
        """Charge the budgets; the pages are taken. What is computed in part reserves no output yet."""
        req.extend_range = Range(start, end)
        self.can_run_list.append(req)
        self.is_alone = False
        input_tokens = self.ceil_paged_tokens(end - start)
        self.rem_input_tokens = max(0, self.rem_input_tokens - input_tokens)
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens = max(0, self.rem_chunk_tokens - self._weight(start, input_tokens))
        if req is not self.new_chunked_req:
            self._admitted_reserve += min(req.num_left_to_plan, CLIP_MAX_NEW_TOKENS) + self.page_size
        if self._forecast is not None:
            self._forecast.add(self._admitted_holder(req))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def num_total_tokens(self, req: Req, extend_len: int) -> int:
        """What a candidate may come to need: its uncached tokens, its clipped output, a page for alignment."""
        return extend_len + min(req.num_left_to_plan, CLIP_MAX_NEW_TOKENS) + self.page_size

    def lacking_tokens(self, req: Req, decode_tokens: int) -> float:
        """What a waiting request (looked up already) lacks by the estimates, once decodes have taken `decode_tokens`.

        0.0 where it fits, or will when pages that are on their way are back.
        """
        if self.is_alone:
            return 0.0
        assert req.last_node is not None
        extend_len = len(req.token_ids) - req.kv_allocated_len
        self.pool.tree_cache.inc_lock_ref(req.last_node)
        verdict = self._memory_verdict(req, extend_len)
        lacking = self.num_total_tokens(req, extend_len) - self.memory_left + decode_tokens + 1
        self.pool.tree_cache.dec_lock_ref(req.last_node)
        if req.ignore_eos and verdict is AddReqResult.CONTINUE:
            return 0.0
        return 0.0 if lacking <= self.pending_tokens else lacking

    def _memory_verdict(self, req: Req, extend_len: int) -> AddReqResult:
        """Whether the candidate fits by the estimates. Its prefix is locked."""
        total_tokens, memory_left = self.num_total_tokens(req, extend_len), self.memory_left
        if req.ignore_eos:
            is_clipped = self._is_clipped or req.num_left_to_plan > CLIP_MAX_NEW_TOKENS
            last_pages = (len(self._running_batch) + len(self.can_run_list)) * self.page_size
            if is_clipped or total_tokens + last_pages >= memory_left:
                return self._add_one_req_ignore_eos(req, extend_len)
        if total_tokens < memory_left:
            return AddReqResult.CONTINUE
        return self._no_memory(total_tokens, total_tokens - memory_left)

    def _add_one_req_ignore_eos(self, req: Req, extend_len: int) -> AddReqResult:
        """Its lifetime is known: walk all completions in order; memory must last until its own."""
        lowest = self.forecast().low_water(extend_len, self.num_steps(req, extend_len))
        if lowest > 0:
            return AddReqResult.CONTINUE
        return self._no_memory(self.num_total_tokens(req, extend_len), -lowest)

    def num_chunks(self, extend_len: int) -> int:
        """Steps that the prefill of a candidate takes, the rest of this one counted as one."""
        if self.rem_chunk_tokens is None:
            return 1
        rest = extend_len - int(min(self.rem_chunk_tokens, self.rem_input_tokens))
        return 1 if rest <= 0 else 2 + rest // self._chunk_tokens

    def num_steps(self, req: Req, extend_len: int) -> int:
        """Steps from its first chunk to its last output."""
        return self.num_chunks(extend_len) + req.num_left_to_plan

    def forecast(self) -> MemoryForecast:
        """Who gives memory back when; made once, and kept up to date while requests are admitted."""
        if self._forecast is None:
            holders = [self._running_holder(req) for req in self._running_batch]
            holders += [Holder(0, 0.0, 0, 0.0, req) for req in self._ending]
            admitted = dict.fromkeys(self.can_run_list)
            if self.new_chunked_req is not None:
                admitted[self.new_chunked_req] = None  # it may have got no page in this step
            holders += [self._admitted_holder(req) for req in admitted]
            self._forecast = MemoryForecast(self.pool, holders)
        return self._forecast

    def _running_holder(self, req: Req) -> Holder:
        rate, num_left = self._rate(req), req.num_left_to_plan
        return Holder(num_left, rate, 0, min(num_left, CLIP_MAX_NEW_TOKENS) * rate, req)

    def _admitted_holder(self, req: Req) -> Holder:
        rate, num_left = self._rate(req), req.num_left_to_plan
        if req is not self.new_chunked_req:
            return Holder(num_left, rate, 0, min(num_left, CLIP_MAX_NEW_TOKENS) + self.page_size, req)
        prompt_left = len(req.token_ids) - req.kv_allocated_len
        reserve = prompt_left + min(num_left, CLIP_MAX_NEW_TOKENS) * rate
        return Holder(num_left + 1 + prompt_left // self._chunk_tokens, rate, prompt_left, reserve, req)

    @property
    def chunked_reserve(self) -> float:
        """What the request that is computed in part will need; `memory_left` does not know of it."""
        return 0.0 if self.new_chunked_req is None else self._admitted_holder(self.new_chunked_req).reserve

    def _rate(self, req: Req) -> float:
        return 1.0 if req.ignore_eos else self._new_token_ratio

    def _sum_running_reserve(self) -> float:
        """The share of their remaining output that running requests are expected to use; this runs in most steps."""
        by_length, by_eos, clip = 0, 0, CLIP_MAX_NEW_TOKENS
        for req in self._running_batch:
            num_left = req.num_left_to_plan
            if num_left > clip:
                num_left = clip
                self._is_clipped = True
            if req.ignore_eos:
                by_length += num_left
            else:
                by_eos += num_left
        return by_length + by_eos * self._new_token_ratio

    # ---- refusal -----------------------------------------------------------------------------------------------------

    def _no_memory(self, need: float, lacking: float) -> AddReqResult:
        """NO_TOKEN, unless more than what lacks is on its way back."""
        self._refuse_for_memory(need, lacking)
        return AddReqResult.OTHER if self.pending_tokens > lacking else AddReqResult.NO_TOKEN

    def _refuse_for_memory(self, need: float, lacking: float) -> AddReqResult:
        self._refuse("memory", need=need, lacking=round(lacking, 1), rem_total_tokens=round(self.rem_total_tokens, 1))
        return AddReqResult.NO_TOKEN

    def _refuse(self, why: str, **numbers: float) -> AddReqResult:
        self.why, self.numbers = why, numbers
        return AddReqResult.OTHER
