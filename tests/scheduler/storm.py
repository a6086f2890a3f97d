"""Everything that can happen to a scheduler, an event a method; what an event may do is checked at once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from millstream.common.finish_reason import FINISH_ABORT
from millstream.common.logprobs import LogprobReq
from millstream.common.messages import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    ExplainReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    child_rid,
)
from millstream.scheduler.req import NO_ROW, Req, ReqStatus
from tests.scheduler.harness import VOCAB_SIZE, Harness
from tests.scheduler.storm_set_up import Ask

NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [VOCAB_SIZE]},
    {"prompt": [-1, 2]},
    {"prompt": [1] * 1000},
    {"prompt": [1], "max_new_tokens": -1},
    {"prompt": [1], "max_new_tokens": 1, "min_new_tokens": 2},
    {"prompt": [1], "timeout": -1.0},
    {"prompt": [1], "waiting_timeout": float("nan")},
    {"prompt": [1], "priority": 2**40},
    *({"prompt": [1], "n": n} for n in (0, -1, 17, 2**40)),
)


class Storm:
    """A harness, what was asked of it, and what must come of that."""

    def __init__(self, set_up: dict[str, Any], shared_lens: tuple[int, ...], *, check_every: int = 1) -> None:
        self.set_up = set_up
        self.shared_lens = shared_lens  # of the prompts to come
        self.harness = Harness(**set_up, check_every=check_every)
        self.state = self.harness.state
        self.asked: dict[str, Ask] = {}
        self.text_ends: dict[str, int] = {}
        self.refusals: dict[str, int] = {}  # rid -> the status that it had to get
        self.aborted: set[str] = set()
        self.controls: list[str] = []  # ids of control requests
        self.log: list[str] = []

    @property
    def seen(self) -> Counter[str]:
        """Rare situations that were met."""
        stats = self.state.stats
        return self.harness.seen + Counter(
            {
                "retracted": stats.num_retractions,
                "preempted": stats.num_preemptions,
                "backfilled": stats.num_backfills,
                "hit tokens": stats.num_hit_tokens,
                **Counter(f"status {self._status(rid)}" for rid in self.harness.clients),
            }
        )

    def _status(self, rid: str) -> int | str:
        ends = self.harness.clients[rid].ends
        reason = ends[0].finish_reason if ends else "text"
        return reason.status_code if isinstance(reason, FINISH_ABORT) else type(reason).__name__

    # ---- requests ----------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """A request comes in; it is refused exactly when it cannot fit or the queue is full."""
        rid = f"r{len(self.asked)}"
        self.log.append(f"{rid}: {ask}")
        status = self._expected_refusal(ask)
        rids = [child_rid(rid, index, ask.n) for index in range(ask.n)]
        self.asked |= dict.fromkeys(rids, ask)
        self._send(rid, ask)
        if status is not None:
            self.refusals |= dict.fromkeys(rids, status)
        for rid in rids:
            is_refused = rid not in self.state.requests
            assert is_refused == (status is not None), f"{rid} is refused: {is_refused}, and should be: {status}"

    def _expected_refusal(self, ask: Ask) -> int | None:
        config, queue, prompt_len = self.harness.scheduler.config, self.state.waiting_queue, len(ask.prompt)
        num_slots = config.num_kv_tokens - config.max_steps_in_flight * (config.decode_width - 1)
        if prompt_len >= config.context_len or prompt_len > num_slots:
            return 400
        queued = sum(req.num_waiting_tokens for req in queue)
        is_full = len(queue) and len(queue) + ask.n > config.max_queued_requests
        return 429 if is_full or (len(queue) and queued + prompt_len > config.queued_tokens_limit) else None

    def _send(self, rid: str, ask: Ask) -> None:
        self.harness.ask(
            rid,
            ask.prompt,
            0 if ask.pooling else ask.max_new_tokens,
            eos=ask.eos,
            ignore_eos=ask.ignore_eos,
            min_new_tokens=0 if ask.pooling else ask.min_new_tokens,
            stop_token_ids=ask.stop_token_ids,
            cache_salt=ask.cache_salt,
            arrival=max(0.0, self.harness.now + 1 - ask.ago),
            priority=ask.priority,
            routing_key=ask.routing_key,
            waiting_timeout=ask.waiting_timeout,
            timeout=ask.timeout,
            n=ask.n,
            logprobs=None if ask.logprob_start is None else LogprobReq(ask.logprob_start),
            pooling=ask.pooling,
        )

    def ask_again(self, rid: str) -> None:
        """The same rid twice in flight: nothing comes of it."""
        if rid in self.state.requests:
            self.log.append(f"{rid} again")
            num_requests = len(self.state.requests)
            self._send(rid, self.asked[rid])
            assert len(self.state.requests) == num_requests

    def ask_nonsense(self, index: int) -> None:
        """What the edge should have refused: a 400, and nothing else changes."""
        rid = f"nonsense{len(self.harness.clients)}"
        options = dict(NONSENSE[index])
        self.log.append(f"{rid}: {options}")
        client = self.harness.ask(rid, options.pop("prompt"), options.pop("max_new_tokens", 1), **options)
        reason = client.ends[0].finish_reason
        assert isinstance(reason, FINISH_ABORT)
        assert reason.status_code == 400

    def abort(self, rids: list[str]) -> None:
        """Clients went away: those that have not ended end now, the others are not told again."""
        self.log.append(f"abort {rids}")
        clients = self.harness.clients
        alive = [rid for rid in rids if rid in self.state.requests and rid not in self.state.ending]
        num_ends = sum(len(client.ends) for client in clients.values())
        self.aborted.update(alive)
        self.harness.abort(*rids)
        assert sum(len(client.ends) for client in clients.values()) == num_ends + len(set(alive))
        for rid in alive:
            reason = clients[rid].ends[0].finish_reason
            assert isinstance(reason, FINISH_ABORT)
            assert reason.status_code == 499

    def abort_family(self, rid: str) -> None:
        """The client of a request for several answers went away: the request is named, and all its answers end."""
        parent = rid.partition("-")[0]
        self.log.append(f"abort {parent} and its answers")
        family = [other for other in self.asked if other.partition("-")[0] == parent]
        alive = [other for other in family if other in self.state.requests and other not in self.state.ending]
        self.aborted.update(alive)
        self.harness.abort(parent)
        assert all(len(self.harness.clients[other].ends) == 1 for other in alive)
        assert not any(other in self.state.requests and other not in self.state.ending for other in family)

    def end_text(self, rid: str, num_back: int) -> None:
        """The detokenizer found a stop string `num_back` tokens ago; its notice may be late, or come twice."""
        num_outputs = len(self.harness.clients[rid].output_ids)
        if num_outputs == 0:
            return
        num_tokens = self.text_ends.setdefault(rid, max(1, num_outputs - num_back))
        self.log.append(f"text of {rid} ends after {num_tokens} tokens")
        self.harness.end_text(rid, num_tokens)
        req = self.state.requests.get(rid)
        assert req is None or (req.status is ReqStatus.ENDING and req.num_outputs <= num_tokens)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def plan(self) -> bool:
        """Plan one step, if there may be one; whether there was."""
        state, now = self.state, self.harness.now
        waiting, running = list(state.waiting_queue), list(state.running_batch.values())
        was_paused, had_deadline = state.is_paused, self.harness.scheduler.next_deadline()
        is_planned = self.harness.plan()
        self.log.append("plan" if is_planned else "plan nothing")
        if is_planned:
            assert not was_paused, "a step is planned during a pause"
            self._check_budgets()
            self._check_decodes(running)
            self._check_order(waiting)
        elif not (state.in_flight or state.is_paused):
            assert not state.requests, "nothing is in flight, and nothing goes on"
        if had_deadline is not None and had_deadline <= now:
            self._check_deadlines(now)
        return is_planned

    def answer(self) -> None:
        """The oldest result comes in, if there is one."""
        if self.harness.results:
            self.log.append("answer")
            self.harness.answer()

    def steps(self, num_steps: int, num_ahead: int = 2) -> None:
        """Plan up to `num_ahead` steps ahead and answer one, so many times; time goes on."""
        for _ in range(num_steps):
            for _ in range(num_ahead):
                self.plan()
            self.answer()
            self.harness.now += 0.25

    def abort_when_short(self, max_steps: int) -> None:
        """Step until a decode lacks a page while a step is in flight, and abort a request of that step."""
        for _ in range(max_steps):
            while self.plan():
                pass
            if self.state.num_missing_pages() > 0 and self.harness.results and self.state.running_batch:
                self.abort([list(self.state.running_batch.values())[-1].rid])
                break
            self.answer()

    def _check_budgets(self) -> None:
        """A step computes no more prompt tokens than its budgets, or one page, or one whole request without chunks."""
        config, step = self.harness.scheduler.config, self.state.in_flight[-1]
        limits = [config.max_prefill_tokens]
        if config.chunked_prefill_size > 0:
            limits.append(config.chunked_prefill_size)
        elif self.state.stats.chunk_tokens:  # automatic: prompt tokens alone
            limits.append(self.state.stats.chunk_tokens + len(step.decodes))
        limit = max(min(limits) - len(step.decodes), config.page_size)
        is_alone = config.chunked_prefill_size <= 0 and len(step.extends) == 1
        assert step.work.num_prefill_tokens <= limit or is_alone, (
            f"{step.work.num_prefill_tokens} prompt tokens, limit {limit}"
        )
        assert len(step.extends) + len(step.decodes) <= config.max_running_requests

    def _check_decodes(self, running: list[Req]) -> None:
        """Prompts never keep running requests from decoding: only a missing page does."""
        step, width = self.state.in_flight[-1], self.harness.scheduler.config.decode_width
        for req in running:
            if (
                req.status is ReqStatus.RUNNING
                and req.num_left_to_plan > 0
                and req not in (*step.decodes, *step.extends)
            ):
                assert req.kv_allocated_len + width > req.num_slots, f"{req.rid} sits out, and has its pages"

    def _check_order(self, waiting: list[Req]) -> None:
        """Under fcfs nobody passes an equal that came before.

        But by backfilling, or past one that waits for a prefix, or aged before the other reached the scheduler.
        """
        if self.set_up["schedule_policy"] != "fcfs":
            return
        queue = self.state.waiting_queue
        passed = [req for req in waiting if req.is_queued and not req.waits_for and not req.num_retractions]
        for late in (req for req in waiting if req.row != NO_ROW and not req.num_retractions):
            wronged = [req for req in passed if req.arrival < late.arrival and req.priority == late.priority]
            if queue.had_aged(late):
                wronged = [req for req in wronged if req.enqueued_step <= late.enqueued_step]
            rids = [req.rid for req in wronged]
            assert not rids or self._is_backfilled(late), f"{late.rid} went ahead of {rids}"

    def _is_backfilled(self, req: Req) -> bool:
        _, events = self.state.journal.explain(req.rid)
        return any(event.what == "backfilled" for event in events)

    def _check_deadlines(self, now: float) -> None:
        config = self.harness.scheduler.config
        for req in self.state.requests.values():
            if req.status is not ReqStatus.ENDING:
                for own, asked, applies in (
                    (config.request_timeout, req.message.timeout, True),
                    (config.request_waiting_timeout, req.message.waiting_timeout, req.first_scheduled is None),
                ):
                    limits = [limit for limit in (own, asked) if limit]
                    assert not (limits and applies) or req.arrival + min(limits) > now, f"{req.rid} is over its time"

    # ---- control -----------------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """POST /pause_generation"""
        self._control(f"pause {mode}", lambda name: PauseGenerationReqInput(name, "http", mode))

    def go_on(self) -> None:
        """POST /continue_generation"""
        self._control("continue", lambda name: ContinueGenerationReqInput(name, "http"))

    def flush(self) -> None:
        """POST /flush_cache; it is done, perhaps after the steps in flight, where no request is left that wants tokens."""
        self._control("flush", lambda name: FlushCacheReqInput(name, "http"))
        name = self.controls[-1]
        self.plan()
        if len(self.state.ending) == len(self.state.requests):
            while self.harness.results:
                self.answer()
            self.plan()
            (reply,) = [reply for reply in self.harness.replies if reply.request_id == name]
            assert isinstance(reply, ControlReqOutput)
            assert reply.success, reply
            assert self.state.pool.tree_cache.evictable_pages == 0

    def abort_all_and_flush(self) -> None:
        """Nobody wants anything any more, while steps may be in flight."""
        self.abort(list(self.asked))
        self.flush()

    def explain(self, rid: str) -> None:
        """GET /debug/requests/{rid}"""
        self._control(f"explain {rid}", lambda name: ExplainReqInput(name, "http", rid))

    def _control(self, what: str, message: Callable[[str], Any]) -> None:
        self.log.append(what)
        self.controls.append(f"{len(self.controls)} {what}")
        self.harness.control(message(self.controls[-1]))

    def advance(self, seconds: float) -> None:
        """Time goes by, and limits pass."""
        self.log.append(f"{seconds:g} s later")
        self.harness.now += seconds

    def look(self) -> None:
        """A load snapshot is taken, as by an idle server after its check: its gauges are within their bounds."""
        self.harness.scheduler.check_when_idle()
        snapshot = self.harness.scheduler.take_snapshot(self.harness.now)
        assert 0 <= snapshot.num_used_tokens <= snapshot.max_total_num_tokens
        assert 0 <= snapshot.num_cached_tokens <= snapshot.max_total_num_tokens - snapshot.num_used_tokens
        assert 0 <= snapshot.num_running_reqs <= self.harness.scheduler.config.max_running_requests
        assert snapshot.num_queue_reqs == len(self.state.waiting_queue)
        assert snapshot.num_queue_tokens == sum(req.num_waiting_tokens for req in self.state.waiting_queue)
        assert snapshot.broken_invariants_total == 0
