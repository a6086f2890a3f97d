"""The scheduler: events in, messages out. It decides who waits, who runs, on which pages, and who ends by token.

Its life is a loop outside (process.py): `handle` what arrived, `process_batch_result`, `get_next_batch_to_run`, send
what `take_output` and `take_replies` hold. Up to two steps are in flight: a step is planned while the one before it
still runs, so its decode rows are planned without their last tokens. It reads no clock: `now` is passed in.
"""

import logging

from ..common.batch_messages import BatchResult, GrammarReady, ScheduleBatch
from ..common.links import ControlReply, ToScheduler
from ..common.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ExplainReqInput,
    FlushCacheReqInput,
    LoadSnapshot,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from ..common.text_messages import BatchTokenIDOutput, TextEnded
from .admission import Refused, admit, check_queue
from .control import Control
from .decode_batch import get_decode_batch
from .fan_out import children_of
from .invariants import check_when_idle
from .output import abort_reason
from .preemption import preempt, victims_to_preempt
from .prefill import get_new_batch_prefill
from .req import ReqStatus
from .results import process_batch_result
from .retraction import retract_decode
from .schedule_batch import announce_step, encode_step, plan_step, with_grammars
from .scheduler_config import SchedulerConfig
from .scheduler_state import SchedulerState
from .time_limits import TimeLimits

logger = logging.getLogger(__name__)


class Scheduler:
    """The facade over the state and the modules that decide."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.state = SchedulerState(config)
        self.control = Control(self.state)
        self.time_limits = TimeLimits(self.state)

    # ---- events ------------------------------------------------------------------------------------------------------

    def handle(self, message: ToScheduler | TextEnded | GrammarReady, now: float) -> None:
        """Take one message that is no result of a step. Never raises for what a request brings."""
        self.state.now = now
        match message:
            case TokenizedGenerateReqInput():
                self._add_request(message)
            case AbortReq():
                for rid in message.rids:
                    self._abort(rid, message)
            case TextEnded():
                self._on_text_ended(message)
            case GrammarReady():
                self._on_grammar_ready(message)
            case FlushCacheReqInput():
                self.control.flush(message)
            case PauseGenerationReqInput():
                self.control.pause(message)
            case ContinueGenerationReqInput():
                self.control.go_on(message)
            case ExplainReqInput():
                self.control.explain(message)

    def _add_request(self, message: TokenizedGenerateReqInput) -> None:
        """The children of one message are taken together, or none of them."""
        state = self.state
        children = children_of(message)
        if any(rid in state.requests for rid in {message.rid, *(child.rid for child in children)}):
            logger.error("request %s: its rid is in use; dropped", message.rid)
            return
        try:
            reqs = [admit(child, self.config) for child in children]
            check_queue(reqs, state.waiting_queue, len(state.grammar_queue), self.config)
        except Refused as error:
            self._refuse(children, str(error), error.status_code, error.err_type)
        except Exception:
            logger.exception("request %s: its admission failed", message.rid)
            self._refuse(children, "The request could not be admitted.", 500)
        else:
            if len(reqs) > 1:
                state.add_family(message.rid, reqs)
            for req in reqs:
                state.add(req)
                self.time_limits.add(req)

    def _refuse(
        self, messages: list[TokenizedGenerateReqInput], text: str, status_code: int, err_type: str | None = None
    ) -> None:
        state = self.state
        for message in messages:
            state.journal.refused(
                message.rid, message.arrival, state.now, state.next_step, status_code=status_code, reason=text
            )
            state.output.add_refusal(message, abort_reason(text, status_code, err_type))

    def _abort(self, rid: str, message: AbortReq) -> None:
        """End a request, or all children of one."""
        for child in list(self.state.families.get(rid, ())):
            self._abort(child, message)
        req = self.state.requests.get(rid)
        if req is not None and req.status is not ReqStatus.ENDING:
            self.state.end(req, abort_reason(message.message, message.status_code))

    def _on_text_ended(self, message: TextEnded) -> None:
        """Only the tokens that the text needed stay, and may be cached; the client has its answer already."""
        state = self.state
        state.journal.text_ended(message.rid, state.now, state.next_step, message.num_tokens)
        req = state.requests.get(message.rid)
        if req is not None:
            state.end_by_text(req, message.num_tokens)

    def _on_grammar_ready(self, message: GrammarReady) -> None:
        state = self.state
        for req in state.grammar_queue.on_ready(message):
            if message.error is None:
                state.start_waiting(req)
            else:
                state.end(req, abort_reason(f"The grammar can not be used: {message.error}", 400))

    def process_batch_result(self, result: BatchResult, now: float) -> None:
        """Take the result of the oldest step in flight; ProtocolError if it does not answer it."""
        self.state.now = now
        process_batch_result(self.state, result)

    # ---- plan --------------------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self, now: float) -> ScheduleBatch | None:
        """Plan one step: all running decodes, then prefill chunks within the budgets. None: there is nothing to send."""
        state = self.state
        state.now = now
        self.time_limits.expire()
        self.control.act()
        batch = self._plan()
        if batch is None and state.grammar_queue.has_news:
            batch = announce_step(state.take_empty_step())
        return batch and with_grammars(batch, state.grammar_queue.take_news())

    def _plan(self) -> ScheduleBatch | None:
        """A step that computes something; None where there is nothing to compute, or it has to wait."""
        state = self.state
        if state.is_paused:
            state.journal.queue_blocked("paused", state.now)
            return None
        if len(state.in_flight) >= self.config.max_steps_in_flight:
            return None
        if not state.requests:
            state.new_token_ratio.reset()
            return None
        if state.num_missing_pages() > 0 and not state.ending:
            if state.in_flight:
                return None  # retraction acts on a drained pipeline
            retract_decode(state)
        if victims := victims_to_preempt(state):
            if state.in_flight:
                return None  # so does preemption
            preempt(state, victims)
        return self._launch()

    def _launch(self) -> ScheduleBatch | None:
        """Choose the rows, note the step as in flight, and make its message."""
        state = self.state
        decodes = get_decode_batch(state)
        prefills = get_new_batch_prefill(state, len(decodes.reqs))
        if not prefills and not decodes.reqs:
            return None
        step = plan_step(state.next_step, prefills, decodes.reqs, self.config.decode_width)
        state.in_flight.append(step)
        state.next_step += 1
        return encode_step(step, decodes.with_new_pages, state.take_freed_rows(prefills))

    # ---- what goes out -----------------------------------------------------------------------------------------------

    def take_output(self) -> BatchTokenIDOutput | None:
        """What the detokenizer should get now."""
        return self.state.output.take()

    def take_replies(self) -> list[ControlReply]:
        """Answers to control requests."""
        return self.control.take_replies()

    def next_deadline(self) -> float | None:
        """When a time limit is due, on the clock of `now`; None: never."""
        return self.time_limits.next_deadline()

    def close(self) -> None:
        """Nothing is called any more."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.state.requests

    def check_when_idle(self) -> None:
        """Check what must be true once nothing runs or waits; count, log and heal what is not."""
        if self.is_idle:
            check_when_idle(self.state)

    def take_snapshot(self, now: float, num_dropped_frames: int = 0) -> LoadSnapshot:
        """Gauges, counters and the observations since the last one."""
        state = self.state
        return state.stats.take_snapshot(
            state.pool,
            num_running_reqs=state.num_running_reqs,
            num_queue_reqs=len(state.waiting_queue),
            num_grammar_queue_reqs=len(state.grammar_queue),
            num_queue_tokens=state.waiting_queue.num_tokens,
            new_token_ratio=state.new_token_ratio.value,
            num_dropped=num_dropped_frames,
            is_paused=state.is_paused,
        )
