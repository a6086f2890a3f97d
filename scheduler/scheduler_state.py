"""All data of the scheduler, and the moves of a request from one place to another.

A request is in exactly one of grammar_queue, waiting_queue, chunked_req, running_batch and ending. The modules that
decide (prefill, decode_batch, retraction, preemption, control) read this state and change it through the moves.
"""

import logging
from typing import Any

from ..common.batch_messages import NO_GRAMMAR
from ..common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FinishReason
from .chunk_size import ChunkSize
from .explanation import Journal
from .grammar_queue import GrammarQueue
from .load import LoadStats
from .new_token_ratio import NewTokenRatio
from .output import TokenOutput
from .page_pool import PagePool
from .req import Req, ReqStatus
from .schedule_batch import StepInFlight
from .scheduler_config import SchedulerConfig
from .waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)


class SchedulerState:
    """`now` is the time of the event that is being handled, `next_step` the number of the next step to be planned."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now = 0.0
        self.next_step = 0
        self.is_paused = False
        self.pool = _new_pool(config)
        self.new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self.chunk_size = ChunkSize(config)
        self.stats = LoadStats()
        self.journal = Journal()
        self.output = TokenOutput()

        self.requests: dict[str, Req] = {}
        self.families: dict[str, dict[str, Req]] = {}  # rid of a request for several answers -> its children that live
        self.waiting_queue = WaitingQueue(config, self.pool.tree_cache)
        self.grammar_queue = GrammarQueue()
        self.chunked_req: Req | None = None
        self.running_batch: dict[int, Req] = {}  # by row, in order of admission
        self.ending: dict[str, Req] = {}  # ended for the client; steps in flight may still touch their pages
        self.prefilling: dict[str, Req] = {}  # of chunked_req and running_batch: those without a result that samples

        self.in_flight: list[StepInFlight] = []
        self.empty_steps: list[int] = []  # planned since the oldest step in flight: they compute nothing
        self.free_rows = list(range(config.max_running_requests - 1, -1, -1))
        self.freed_rows: list[int] = []  # to be told to the workers with the next step
        self.worker_rows: set[int] = set()  # as the workers know them
        self._row_generations = [0] * config.max_running_requests

    @property
    def num_running_reqs(self) -> int:
        """Requests that hold a row and have not ended."""
        return len(self.running_batch) + (self.chunked_req is not None)

    @property
    def num_holders(self) -> int:
        """Requests that hold a row, those that are ending included."""
        return self.num_running_reqs + len(self.ending)

    def is_in_flight(self, req: Req) -> bool:
        """Whether the result of a step with this request is not back."""
        return bool(self.in_flight) and req.last_step >= self.in_flight[0].step

    # ---- moves -------------------------------------------------------------------------------------------------------

    def add(self, req: Req) -> None:
        """A new request waits; for its grammar first, where that is not compiled."""
        self.requests[req.rid] = req
        req.enqueued_step = self.next_step
        if req.message.grammar is not None:
            self.stats.num_grammar_reqs += 1
            if not self.grammar_queue.add(req):
                req.move_to(ReqStatus.GRAMMAR)
                self.note(req, "grammar", waiting=len(self.grammar_queue))
                return
        self._enqueue(req)

    def add_family(self, rid: str, reqs: list[Req]) -> None:
        """These requests are the children of one; each is to be added."""
        self.families[rid] = {req.rid: req for req in reqs}
        for index, req in enumerate(reqs):
            req.family, req.counts_prompt = rid, index == 0

    def start_waiting(self, req: Req) -> None:
        """The grammar of a request is compiled."""
        self.grammar_queue.remove(req)
        req.move_to(ReqStatus.WAITING)
        self._enqueue(req)

    def _enqueue(self, req: Req) -> None:
        queue, policy = self.waiting_queue, self.config.schedule_policy
        self.note(req, "queued", position=len(queue), queue_tokens=queue.num_tokens, policy=policy)
        queue.add(req, self.next_step)
        logger.debug("request %s: waits with %d prompt tokens", req.rid, req.prompt_len)

    def start_running(self, req: Req) -> None:
        """Give an admitted request its row, and move it on when its whole prompt is planned."""
        if req.is_queued:
            self.waiting_queue.remove(req)
            req.row = self.free_rows.pop()
            self._row_generations[req.row] += 1
            req.row_generation = self._row_generations[req.row]
            self.prefilling[req.rid] = req
            self._note_admitted(req)
        start, end = req.extend_range
        if end == len(req.token_ids):
            if req is self.chunked_req:
                self.chunked_req = None
            req.move_to(ReqStatus.RUNNING)
            self.running_batch[req.row] = req
        elif req.is_queued:
            req.move_to(ReqStatus.PREFILLING)
            self.chunked_req = req
        self.note(req, "chunk", start=start, end=end)

    def _note_admitted(self, req: Req) -> None:
        num_cached, num_known = req.extend_range.start, len(req.token_ids)
        if req.first_scheduled is None:
            req.first_scheduled = self.now
            req.cached_tokens = num_cached
            waited = self.now - req.arrival
            self.stats.on_first_scheduled(waited, req.prompt_len, num_cached, counts_prompt=req.counts_prompt)
        waited = round(self.now - req.arrival, 6)
        new_tokens = num_known - num_cached
        self.note(req, "admitted", row=req.row, cached_tokens=num_cached, new_tokens=new_tokens, waited_seconds=waited)
        logger.debug("request %s: starts in row %d with %d cached tokens", req.rid, req.row, num_cached)

    def retract(self, req: Req, what: str, **numbers: float | str) -> None:
        """Take pages and row away (nothing of it may be in flight); it waits again, and keeps its outputs."""
        assert not self.is_in_flight(req), "retraction acts on a drained pipeline"
        self.note(req, what, outputs=req.num_outputs, held_pages=len(req.page_ids), **numbers)
        self._leave_place(req)
        self._free(req)
        req.reset_cache_state()
        req.num_retractions += 1
        req.move_to(ReqStatus.RETRACTED)
        self.waiting_queue.add(req, self.next_step)

    def end(self, req: Req, reason: FinishReason) -> None:
        """End a request from any place: tell the client, and free it once nothing is in flight."""
        self._leave_place(req)
        self.output.add_end(req, reason)
        self._end(req, _reason_numbers(reason))

    def end_by_text(self, req: Req, num_tokens: int) -> None:
        """The text ended after `num_tokens` outputs, and the client has its answer: only these may be cached."""
        is_ending = req.status is ReqStatus.ENDING
        if not is_ending:
            self._leave_place(req)
        req.keep_outputs(num_tokens)
        if not is_ending:
            self._end(req, {"reason": "text"})

    def _end(self, req: Req, numbers: dict[str, Any]) -> None:
        self.journal.end(req, self.now, self.next_step, **numbers)
        if self.is_in_flight(req):
            req.move_to(ReqStatus.ENDING)
            self.ending[req.rid] = req
        else:
            self._release(req)

    def release_ended(self, req: Req) -> None:
        """The last step in flight of an ending request is back."""
        del self.ending[req.rid]
        self._release(req)

    def _leave_place(self, req: Req) -> None:
        self.prefilling.pop(req.rid, None)
        if req.status is ReqStatus.GRAMMAR:
            self.grammar_queue.remove(req)
        elif req.is_queued:
            self.waiting_queue.remove(req)
        elif req is self.chunked_req:
            self.chunked_req = None
        else:
            del self.running_batch[req.row]

    def _release(self, req: Req) -> None:
        if not req.is_queued:
            self._free(req)
        if req.grammar != NO_GRAMMAR:
            self.grammar_queue.release(req)
        req.move_to(ReqStatus.FINISHED)
        del self.requests[req.rid]
        self._leave_family(req)

    def _leave_family(self, req: Req) -> None:
        if req.family is None:
            return
        siblings = self.families[req.family]
        del siblings[req.rid]
        if not siblings:
            del self.families[req.family]

    def _free(self, req: Req) -> None:
        """Give back pages and row; the whole pages that are committed stay in the tree."""
        self.pool.cache_finished_req(req)
        self.free_rows.append(req.row)
        self.freed_rows.append(req.row)

    def take_freed_rows(self, prefills: list[Req]) -> list[int]:
        """The rows that the next step frees, once; `prefills` are its requests, new ones among them."""
        freed_rows, self.freed_rows = self.freed_rows, []
        self.worker_rows.difference_update(freed_rows)
        self.worker_rows.update([req.row for req in prefills])
        return freed_rows

    def take_empty_step(self) -> int:
        """The number of a step that has no result."""
        self.empty_steps = [step for step in self.empty_steps if self.in_flight and step > self.in_flight[0].step]
        self.empty_steps.append(self.next_step)
        self.next_step += 1
        return self.empty_steps[-1]

    def note(self, req: Req, what: str, **numbers: float | str) -> None:
        """Write into the request's story."""
        self.journal.note(req, self.now, self.next_step, what, **numbers)

    def rebuild(self) -> None:
        """Pages, rows and queue made anew, after something of them was lost. Nothing may run or wait."""
        assert not self.requests, "only an idle scheduler is rebuilt"
        self.pool = _new_pool(self.config)
        self.waiting_queue = WaitingQueue(self.config, self.pool.tree_cache)
        self.chunked_req = None
        self.running_batch, self.ending, self.prefilling = {}, {}, {}
        self.new_token_ratio.reset()
        self.freed_rows = sorted(self.worker_rows)
        self.free_rows = list(range(self.config.max_running_requests - 1, -1, -1))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def num_missing_pages(self) -> int:
        """Pages that the running requests lack for one more step each; not positive when there are enough."""
        width, num_pages_for = self.config.decode_width, self.pool.num_pages_for
        num_available = self.pool.num_available_pages
        if num_available >= len(self.running_batch) * num_pages_for(width):
            return 0
        num_needed = sum(
            num_pages_for(req.kv_allocated_len + width) - len(req.page_ids)
            for req in self.running_batch.values()
            if req.kv_allocated_len + width > req.num_slots and req.num_left_to_plan > 0
        )
        return num_needed - num_available


def _new_pool(config: SchedulerConfig) -> PagePool:
    return PagePool(
        config.num_pages,
        config.page_size,
        disable_radix_cache=config.disable_radix_cache,
        eviction_policy=config.radix_eviction_policy,
    )


def _reason_numbers(reason: FinishReason) -> dict[str, Any]:
    """How the journal tells an end."""
    if isinstance(reason, FINISH_ABORT):
        return {"reason": "abort", "message": reason.message, "status_code": reason.status_code}
    if isinstance(reason, FINISH_LENGTH):
        return {"reason": "length"}
    return {"reason": "stop", "matched": reason.matched}
