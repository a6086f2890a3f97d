"""Pause, continue and flush: they act on a drained pipeline, and are answered when they are done."""

import logging

from ..common.links import ControlReply
from ..common.messages import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    ExplainReqInput,
    ExplainReqOutput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from .scheduler_state import SchedulerState

logger = logging.getLogger(__name__)


class Control:
    """The control requests that wait for steps in flight, and the answers that wait to be taken."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pauses: list[PauseGenerationReqInput] = []
        self._flushes: list[FlushCacheReqInput] = []
        self._replies: list[ControlReply] = []

    def pause(self, message: PauseGenerationReqInput) -> None:
        """No step is planned from now on; the answer comes when none is in flight."""
        self._state.is_paused = True
        self._pauses.append(message)

    def go_on(self, message: ContinueGenerationReqInput) -> None:
        """Plan again."""
        was_paused, self._state.is_paused = self._state.is_paused, False
        for pause in self._pauses:
            self._reply(pause.request_id, "Generation was continued before the pause was complete.", success=False)
        self._pauses = []
        logger.info("generation goes on")
        self._reply(message.request_id, "Generation goes on." if was_paused else "Generation was not paused.")

    def flush(self, message: FlushCacheReqInput) -> None:
        """Empty the tree as soon as may be."""
        self._flushes.append(message)

    def explain(self, message: ExplainReqInput) -> None:
        """Tell a request's story."""
        state = self._state
        status, events = state.journal.explain(message.rid, state.now, state.next_step)
        self._replies.append(ExplainReqOutput(message.request_id, message.rid, status, events))

    def act(self) -> None:
        """Do what waits, as far as the steps in flight allow."""
        state = self._state
        if self._pauses and not state.in_flight:
            self._complete_pauses()
        if self._flushes and not self._must_wait_to_flush():
            self._complete_flushes()

    def take_replies(self) -> list[ControlReply]:
        """Answers since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def _complete_pauses(self) -> None:
        """Nothing is in flight. Retracted requests wait as if they had never run, with the outputs that they have."""
        state = self._state
        if any(pause.mode == "retract" for pause in self._pauses):
            running = [*state.running_batch.values(), *([state.chunked_req] if state.chunked_req else [])]
            for req in running:
                state.retract(req, "retracted", reason="paused")
            state.stats.num_retractions += len(running)
        logger.info("generation is paused; %d requests wait", len(state.requests))
        for pause in self._pauses:
            self._reply(pause.request_id, f"Generation is paused; {len(state.requests)} requests wait.")
        self._pauses = []

    def _must_wait_to_flush(self) -> bool:
        """Whether the only requests that hold pages have ended, and their last steps are not back."""
        state = self._state
        return bool(state.in_flight) and (state.is_paused or len(state.requests) == len(state.ending))

    def _complete_flushes(self) -> None:
        """Empty the tree, or refuse while a request holds pages, or waits and will hold some in the next step."""
        state = self._state
        num_in_use = len(state.requests) if not state.is_paused else state.num_holders
        message = f"{num_in_use} requests are running or waiting." if num_in_use else "The cache is empty now."
        if not num_in_use:
            state.pool.reset()
            logger.info("the prefix cache is empty now")
        for flush in self._flushes:
            self._reply(flush.request_id, message, success=not num_in_use)
        self._flushes = []

    def _reply(self, request_id: str, message: str, *, success: bool = True) -> None:
        self._replies.append(ControlReqOutput(request_id, success, message))
