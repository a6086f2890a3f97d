"""The scheduler: events in, messages out. It decides who waits, who runs, on which pages, and who ends by token.

Its life is a loop outside (process.py): `handle` what arrived, `process_batch_result`, `get_next_batch_to_run`, send
what `take_output` and `take_replies` hold. Up to two steps are in flight: a step is planned while the one before it
still runs, so its decode rows are planned without their last tokens. It reads no clock: `now` is passed in.
"""

import logging
from itertools import chain

import msgspec

from ..common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_TOKEN, FinishReason
from ..common.links import ToScheduler
from ..common.messages import (
    AbortReq,
    BatchResult,
    BatchTokenIDOutput,
    ControlReqOutput,
    FlushCacheReqInput,
    LoadSnapshot,
    ScheduleBatch,
    TextEnded,
    TokenizedGenerateReqInput,
)
from .admission import Limits, Refused, admit
from .load import LoadStats
from .new_token_ratio import NewTokenRatio
from .output import TokenOutput, abort_reason
from .page_pool import PagePool
from .prefill_adder import AddReqResult, PrefillAdder
from .prefix_sharing import find_prefix_to_wait_for, still_waits
from .req import Req, ReqStatus
from .schedule_batch import ProtocolError, RowResult, StepInFlight, encode_step, plan_step, read_result
from .schedule_policy import enqueue, retraction_order

MAX_RETRACTIONS = 3  # a request that was retracted so often goes last

logger = logging.getLogger(__name__)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What flags and workers say."""

    num_pages: int
    page_size: int
    vocab_size: int
    context_len: int
    max_running_requests: int
    chunked_prefill_size: int = 512  # -1: no chunking
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False


class Scheduler:
    """Every request is in exactly one of waiting_queue, chunked_req, running_batch and ending."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages, config.page_size, disable_radix_cache=config.disable_radix_cache)
        self.limits = Limits(config.vocab_size, config.context_len, self.pool.max_total_num_tokens)
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self.stats = LoadStats()

        self.requests: dict[str, Req] = {}
        self.waiting_queue: list[Req] = []
        self.chunked_req: Req | None = None
        self.running_batch: dict[int, Req] = {}  # by row, in order of admission
        self.ending: dict[str, Req] = {}  # ended for the client; steps in flight may still touch their pages
        self.prefilling: dict[str, Req] = {}  # of chunked_req and running_batch: those without a result that samples

        self.max_steps_in_flight = 1 if config.disable_overlap_schedule else 2
        self.in_flight: list[StepInFlight] = []
        self.free_rows = list(range(config.max_running_requests - 1, -1, -1))
        self._row_generations = [0] * config.max_running_requests
        self._freed_rows: list[int] = []  # to be told to the workers with the next step
        self._next_step = 0
        self._output = TokenOutput()
        self._flushes: list[FlushCacheReqInput] = []
        self._replies: list[ControlReqOutput] = []

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, message: ToScheduler | TextEnded) -> None:
        """Take one message from the tokenizer manager or the detokenizer. Never raises for what a request brings."""
        match message:
            case TokenizedGenerateReqInput():
                self._add_request(message)
            case AbortReq():
                for rid in message.rids:
                    self._abort(rid, message)
            case TextEnded():
                self._on_text_ended(message)
            case FlushCacheReqInput():
                self._flushes.append(message)

    def _add_request(self, message: TokenizedGenerateReqInput) -> None:
        if message.rid in self.requests:
            logger.error("request %s: its rid is in use; dropped", message.rid)
            return
        try:
            req = admit(message, self.limits)
        except Refused as error:
            self._output.add_refusal(message, abort_reason(str(error), error.status_code))
        except Exception:
            logger.exception("request %s: its admission failed", message.rid)
            self._output.add_refusal(message, abort_reason("The request could not be admitted.", 500))
        else:
            self.requests[req.rid] = req
            enqueue(self.waiting_queue, req, self.config.schedule_policy)
            logger.debug("request %s: waits with %d prompt tokens", req.rid, req.prompt_len)

    def _abort(self, rid: str, message: AbortReq) -> None:
        req = self.requests.get(rid)
        if req is not None and req.status is not ReqStatus.ENDING:
            self._end(req, abort_reason(message.message, message.status_code))

    def _on_text_ended(self, message: TextEnded) -> None:
        """Only the tokens that the text needed stay, and may be cached; the client has its answer already."""
        req = self.requests.get(message.rid)
        if req is None:
            return
        req.keep_outputs(message.num_tokens)
        if req.status is not ReqStatus.ENDING:
            self._end(req, None)

    def process_batch_result(self, result: BatchResult) -> None:
        """Take the result of the oldest step in flight. Rows of requests that ended meanwhile are dropped."""
        if not self.in_flight:
            raise ProtocolError(f"a result of step {result.step} came, and no step is in flight")
        self.stats.on_step(result.step_seconds)
        for row_result in read_result(self.in_flight.pop(0), result):
            req = row_result.planned.req
            req.num_steps_in_flight -= 1
            req.num_samples_in_flight -= row_result.planned.samples
            if req.status is not ReqStatus.ENDING:
                self._process_row(req, row_result)
            elif req.num_steps_in_flight == 0:
                del self.ending[req.rid]
                self._release(req)

    def _process_row(self, req: Req, result: RowResult) -> None:
        if result.error is not None:
            self._end(req, abort_reason(result.error, 500))
            return
        req.kv_committed_len = result.planned.end
        end = self._append_tokens(req, result.token_ids)
        self.pool.cache_unfinished_req(req)
        if result.planned.samples:
            self.prefilling.pop(req.rid, None)
        if end is not None:
            self._end(req, end)

    def _append_tokens(self, req: Req, token_ids: list[int]) -> FinishReason | None:
        """Add outputs one by one up to the one that ends the request; returns how it ends, if it does."""
        end: FinishReason | None = None
        for num_new, token_id in enumerate(token_ids, 1):
            req.token_ids.append(token_id)
            if token_id in req.end_token_ids:
                end = FINISH_MATCHED_TOKEN(token_id)
            elif req.num_outputs >= req.max_new_tokens:
                end = FINISH_LENGTH(req.num_outputs)
            if end is not None:
                token_ids = token_ids[:num_new]
                break
        if token_ids:
            self._output.add_tokens(req, token_ids)
        return end

    # ---- plan --------------------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self, now: float) -> ScheduleBatch | None:
        """Plan one step: all running decodes, then prefill chunks within the budgets. None: there is nothing to send."""
        if len(self.in_flight) >= self.max_steps_in_flight:
            return None
        self._answer_flushes()
        if not self.requests:
            self.new_token_ratio.reset()
            return None
        if self._num_missing_pages() > 0 and not self.ending:
            if self.in_flight:
                return None  # retraction acts on a drained pipeline
            self._retract_decode()
        decodes = self._get_decode_batch()
        prefills = self._get_new_batch_prefill(len(decodes), now)
        return self._launch(prefills, decodes) if prefills or decodes else None

    def _num_missing_pages(self) -> int:
        """Pages that the running requests lack for one more token each; not positive when there are enough."""
        return sum(map(self._needs_page, self.running_batch.values())) - self.pool.num_available_pages

    def _needs_page(self, req: Req) -> bool:
        return req.kv_allocated_len == len(req.page_ids) * self.pool.page_size and req.can_decode

    def _get_decode_batch(self) -> list[Req]:
        """The running requests that decode in this step, with a slot each.

        Pages may be short while those of ending requests are not back: rows that get none sit the step out.
        """
        num_available_pages = self.pool.num_available_pages
        decodes = []
        for req in self.running_batch.values():
            if not req.can_decode:
                continue
            if req.kv_allocated_len == len(req.page_ids) * self.pool.page_size:
                if num_available_pages == 0:
                    continue
                num_available_pages -= 1
            decodes.append(req)
        for req in decodes:
            grown = self.pool.grow(req, req.kv_allocated_len + 1)
            assert grown, "pages were counted before they were taken"
        if decodes:
            self.new_token_ratio.on_decode_step()
        return decodes

    def _get_new_batch_prefill(self, num_decodes: int, now: float) -> list[Req]:
        """The prefill rows of this step: the chunked request goes on first, then waiting ones in order."""
        if self.chunked_req is None and not (self.waiting_queue and self.free_rows):
            return []
        adder = self._prefill_adder(num_decodes)
        verdict = adder.budget_state() if self.chunked_req is None else adder.add_chunked_req(self.chunked_req)
        for req in self.waiting_queue:
            if verdict is not AddReqResult.CONTINUE:
                break
            if not self._waits_for_prefix(req, adder):
                verdict = adder.add_one_req(req)
        for req in adder.can_run_list:
            self._start_running(req, now)
        self.chunked_req = adder.new_chunked_req
        if adder.can_run_list:
            self.waiting_queue = [req for req in self.waiting_queue if req.is_queued]
        return adder.can_run_list

    def _prefill_adder(self, num_decodes: int) -> PrefillAdder:
        chunk = self.config.chunked_prefill_size
        return PrefillAdder(
            self.pool,
            self.running_batch.values(),
            self.new_token_ratio.value,
            rem_input_tokens=self.config.max_prefill_tokens,
            rem_chunk_tokens=chunk if chunk > 0 else None,
            num_mixed_decode_tokens=num_decodes,
            prefill_max_requests=len(self.free_rows) + (self.chunked_req is not None),
        )

    def _waits_for_prefix(self, req: Req, adder: PrefillAdder) -> bool:
        """Whether another request is computing a prefix of this one; looks this one up in the tree if not."""
        if still_waits(req, self.pool.page_size):
            return True
        self.pool.init_next_round_input(req)
        if self.config.disable_radix_cache:
            return False
        prefilling = chain(self.prefilling.values(), adder.can_run_list)
        req.waits_for = find_prefix_to_wait_for(req, prefilling, self.pool.page_size)
        return req.waits_for is not None

    def _start_running(self, req: Req, now: float) -> None:
        """Give an admitted request its row, and move it on when its whole prompt is planned."""
        if req.is_queued:
            req.row = self.free_rows.pop()
            self._row_generations[req.row] += 1
            req.row_generation = self._row_generations[req.row]
            self.prefilling[req.rid] = req
        if req.first_scheduled is None:
            req.first_scheduled = now
            req.cached_tokens = req.extend_range.start
            self.stats.on_first_scheduled(now - req.message.arrival, req.prompt_len, req.cached_tokens)
            logger.debug("request %s: starts in row %d with %d cached tokens", req.rid, req.row, req.cached_tokens)
        if req.extend_range.end == len(req.token_ids):
            req.move_to(ReqStatus.RUNNING)
            self.running_batch[req.row] = req
        elif req.is_queued:
            req.move_to(ReqStatus.PREFILLING)

    def _launch(self, prefills: list[Req], decodes: list[Req]) -> ScheduleBatch:
        """Note the step as in flight and make its message."""
        step, self._next_step = self._next_step, self._next_step + 1
        self.in_flight.append(plan_step(step, prefills, decodes))
        freed_rows, self._freed_rows = self._freed_rows, []
        return encode_step(step, prefills, decodes, freed_rows)

    # ---- retraction and ends -----------------------------------------------------------------------------------------

    def _retract_decode(self) -> None:
        """Give up requests until the others can decode. The last one is never given up: it ends if it can't go on."""
        candidates = [*self.running_batch.values(), *([self.chunked_req] if self.chunked_req else [])]
        candidates = retraction_order(candidates, MAX_RETRACTIONS)
        num_candidates = len(candidates)
        while len(candidates) > 1 and self._num_missing_pages() > 0:
            self._retract(candidates.pop(0))
        self.new_token_ratio.on_retract(candidates)
        logger.warning(
            "KV cache is full: retracted %d of %d requests; new_token_ratio is %.3f now",
            num_candidates - len(candidates),
            num_candidates,
            self.new_token_ratio.value,
        )
        if self._num_missing_pages() > 0:
            num_tokens, num_slots = len(candidates[0].token_ids), self.pool.max_total_num_tokens
            text = (
                f"Out of KV cache: the request has {num_tokens} tokens, and all other requests were retracted already"
            )
            self._end(candidates[0], abort_reason(f"{text}; the cache holds {num_slots} tokens.", 500))

    def _retract(self, req: Req) -> None:
        """Take pages and row away; it waits again, ahead of those that came after it, and keeps its outputs."""
        self._leave_place(req)
        self._free(req)
        req.reset_for_retract()
        req.move_to(ReqStatus.RETRACTED)
        enqueue(self.waiting_queue, req, self.config.schedule_policy)
        self.stats.num_retractions += 1

    def _end(self, req: Req, reason: FinishReason | None) -> None:
        """End a request from any place: tell the client (unless the text did), and free it once nothing is in flight."""
        self._leave_place(req)
        if reason is not None:
            self._output.add_end(req, reason)
        if req.num_steps_in_flight:
            req.move_to(ReqStatus.ENDING)
            self.ending[req.rid] = req
        else:
            self._release(req)

    def _leave_place(self, req: Req) -> None:
        self.prefilling.pop(req.rid, None)
        if req.is_queued:
            self.waiting_queue.remove(req)
        elif req is self.chunked_req:
            self.chunked_req = None
        else:
            del self.running_batch[req.row]

    def _release(self, req: Req) -> None:
        if not req.is_queued:
            self._free(req)
        req.move_to(ReqStatus.FINISHED)
        del self.requests[req.rid]

    def _free(self, req: Req) -> None:
        """Give back pages and row; the whole pages that are committed stay in the tree."""
        self.pool.cache_finished_req(req)
        self.free_rows.append(req.row)
        self._freed_rows.append(req.row)

    # ---- control and status ------------------------------------------------------------------------------------------

    def _answer_flushes(self) -> None:
        """Empty the tree once nothing is left in flight; refuse while anything runs or waits."""
        if not self._flushes or (self.in_flight and len(self.requests) == len(self.ending)):
            return
        message = (
            f"{len(self.requests)} requests are running or waiting." if self.requests else "The cache is empty now."
        )
        if not self.requests:
            self.pool.reset()
        self._replies += [ControlReqOutput(each.request_id, not self.requests, message) for each in self._flushes]
        self._flushes = []

    def take_output(self) -> BatchTokenIDOutput | None:
        """What the detokenizer should get now."""
        return self._output.take()

    def take_replies(self) -> list[ControlReqOutput]:
        """Answers to control requests."""
        replies, self._replies = self._replies, []
        return replies

    def take_snapshot(self, num_dropped_frames: int = 0) -> LoadSnapshot:
        """Gauges, counters and the observations since the last one."""
        return self.stats.take_snapshot(
            self.pool,
            num_running_reqs=len(self.running_batch) + (self.chunked_req is not None),
            num_queue_reqs=len(self.waiting_queue),
            new_token_ratio=self.new_token_ratio.value,
            num_dropped=num_dropped_frames,
        )
