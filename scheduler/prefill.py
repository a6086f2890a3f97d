"""The prefill rows of a step: the chunked request goes on first, then waiting ones in order, within the budgets.

The first candidate that does not fit ends the pass, with two exceptions. One that waits for a prefix which another
request is computing is skipped (MAX_SKIPPED in a step: the prefix is on its way, and so the wait is short; an aged one
does not wait but computes its own). And where memory is what the first one lacks, smaller ones may pass it as far as
backfilling allows. Why a request was left out is noted in its journal.
"""

import math
from collections.abc import Iterator
from itertools import chain, islice

from .backfilling import MAX_BACKFILLS, Reservation
from .prefill_adder import AddReqResult, PrefillAdder
from .prefix_sharing import PrefixesOnTheWay, waits_for_prefix
from .req import Req
from .scheduler_state import SchedulerState

MAX_SKIPPED = 32  # candidates of a step that wait for a prefix
MAX_TRIED_PAST_HEAD = 32  # candidates of a step that are looked at behind a blocked one
MAX_REFUSED_PAST_HEAD = 4  # of these, how many may turn out not to fit: a walk over all running requests each


def get_new_batch_prefill(state: SchedulerState, num_decodes: int) -> list[Req]:
    """Admit what fits and start it; returns the prefill rows of this step."""
    if not state.waiting_queue:
        state.journal.queue_blocked(None, state.now)
        if state.chunked_req is None:
            return []
    if state.chunked_req is None and not state.free_rows:
        _note_no_rows(state)
        return []
    adder = make_prefill_adder(state, num_decodes)
    state.stats.chunk_tokens = int(adder.rem_chunk_tokens or 0)
    if state.chunked_req is not None:
        adder.add_chunked_req(state.chunked_req)
    if state.waiting_queue:
        PrefillPass(state, adder).add_waiting()
    for req in adder.can_run_list:
        state.start_running(req)
    return adder.can_run_list


def make_prefill_adder(state: SchedulerState, num_decodes: int) -> PrefillAdder:
    """The budgets of a step beside `num_decodes` decode rows."""
    queue, chunk_size = state.waiting_queue, state.chunk_size
    num_behind = len(queue) - (state.chunked_req is None)
    budget = chunk_size.budget(num_decodes, num_behind, queue.oldest_waiting_seconds(state.now))
    return PrefillAdder(
        state.pool,
        state.running_batch.values(),
        state.new_token_ratio.value,
        rem_input_tokens=state.config.max_prefill_tokens,
        rem_chunk_tokens=None if budget is None else budget.tokens + num_decodes,
        attention_len=math.inf if budget is None else budget.attention_len,
        num_mixed_decode_tokens=num_decodes,
        prefill_max_requests=len(state.free_rows) + (state.chunked_req is not None),
        ending=state.ending.values(),
    )


class PrefillPass:
    """One walk over the waiting requests."""

    def __init__(self, state: SchedulerState, adder: PrefillAdder) -> None:
        self._state = state
        self._adder = adder
        self._on_the_way: PrefixesOnTheWay | None = None
        self._num_skipped = 0

    def add_waiting(self) -> None:
        """Admit in order, up to the first that does not fit; then those that may pass it."""
        state, adder = self._state, self._adder
        candidates = state.waiting_queue.candidates(state.next_step, state.running_batch.values())
        for req in candidates:
            if self._num_skipped == MAX_SKIPPED:
                break
            if adder.step_budget_state() is not AddReqResult.CONTINUE:
                self._note_head_blocked(req)
                return
            if self._is_skipped(req):
                continue
            verdict = adder.add_one_req(req)
            if adder.has_admitted(req):
                self._on_admitted(req)
                continue
            self._note_head_blocked(req)
            if verdict is AddReqResult.NO_TOKEN:
                self._backfill(req, candidates)
            return
        state.journal.queue_blocked("prefix of another request" if self._num_skipped else None, state.now)

    def _backfill(self, head: Req, others: Iterator[Req]) -> None:
        """`head` lacks memory, and a row is free: let those pass that do not make it wait longer."""
        state, adder = self._state, self._adder
        reservation: Reservation | None = None
        num_refused = 0
        for req in islice(others, MAX_TRIED_PAST_HEAD):
            if head.num_backfills >= MAX_BACKFILLS or adder.step_budget_state() is not AddReqResult.CONTINUE:
                return
            reservation = reservation or Reservation(adder, head)
            if self._is_skipped(req):
                continue
            share = reservation.share_of(req)
            if share is None:
                self._note_reserved(req, head, reservation)
                continue
            verdict = adder.add_one_req(req)
            if adder.has_admitted(req):
                reservation.extra_tokens -= share
                head.num_backfills += 1
                state.stats.num_backfills += 1
                state.note(req, "backfilled", past=head.rid)
                self._on_admitted(req)
                continue
            self._note_blocked(req)
            num_refused += 1
            if verdict is AddReqResult.OTHER or num_refused == MAX_REFUSED_PAST_HEAD:
                return

    def _is_skipped(self, req: Req) -> bool:
        """Whether it waits for a prefix of another request; it is looked up in the tree if not."""
        state, pool = self._state, self._state.pool
        if state.waiting_queue.is_aged(req, state.next_step):
            req.waits_for = None
            pool.init_next_round_input(req)
            return False
        if self._on_the_way is None:
            prefilling = chain(state.prefilling.values(), self._adder.can_run_list)
            self._on_the_way = PrefixesOnTheWay(pool.page_size, dict.fromkeys(prefilling))
        if not waits_for_prefix(req, pool, self._on_the_way):
            return False
        assert req.waits_for is not None
        other, shared_len = req.waits_for
        self._num_skipped += 1
        self._note(req, "prefix of another request", of=other.rid, tokens=shared_len)
        return True

    def _on_admitted(self, req: Req) -> None:
        if self._on_the_way is not None:
            self._on_the_way.add(req)

    def _note_head_blocked(self, req: Req) -> None:
        """The first that does not get in; all behind it wait for the same reason."""
        self._state.journal.queue_blocked(self._adder.why, self._state.now)
        self._note_blocked(req)

    def _note_blocked(self, req: Req) -> None:
        self._note(req, self._adder.why, **self._adder.numbers)

    def _note_reserved(self, req: Req, head: Req, reservation: Reservation) -> None:
        extra_tokens = round(reservation.extra_tokens, 1)
        self._note(req, "reserved for the head", head=head.rid, steps=reservation.start_step, extra_tokens=extra_tokens)

    def _note(self, req: Req, reason: str, **numbers: float | str) -> None:
        state = self._state
        state.journal.blocked(req, state.now, state.next_step, reason, **numbers)


def _note_no_rows(state: SchedulerState) -> None:
    """Tell the first candidate that all rows are taken."""
    queue, running = state.waiting_queue, state.running_batch.values()
    head = next(queue.candidates(state.next_step, running))
    state.journal.queue_blocked("rows", state.now)
    state.journal.blocked(head, state.now, state.next_step, "rows", rows=state.config.max_running_requests)
