"""How long a request may wait for its grammar and for its first step, and how long it may take in all."""

import heapq

from .output import abort_reason
from .req import Req, ReqStatus
from .scheduler_state import SchedulerState

LIMITS = 2  # of most requests
ON_GRAMMAR, ON_WAITING, ON_ALL = range(3)
GRAMMAR_SECONDS = 30.0  # from arrival; it has been compiled once before, in much less
SLACK = 64


class TimeLimits:
    """A heap of times at which a limit of a live request is due. The server's limits can only be lowered.

    Entries of requests that ended before their limit stay until they are more than the others: O(log n) a request.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._heap: list[tuple[float, str, int]] = []  # (when, rid, which limit)

    def add(self, req: Req) -> None:
        """Watch a new request."""
        config, message = self._state.config, req.message
        for which, own, asked in (
            (ON_GRAMMAR, GRAMMAR_SECONDS if req.status is ReqStatus.GRAMMAR else None, None),
            (ON_WAITING, config.request_waiting_timeout, message.waiting_timeout),
            (ON_ALL, config.request_timeout, message.timeout),
        ):
            limits = [limit for limit in (own, asked) if limit]
            if limits:
                heapq.heappush(self._heap, (req.arrival + min(limits), req.rid, which))
        if len(self._heap) > 2 * LIMITS * len(self._state.requests) + SLACK:
            self._heap = [entry for entry in self._heap if self._is_due_for(entry) is not None]
            heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        """When the next limit is due; None: never."""
        while self._heap and self._is_due_for(self._heap[0]) is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expire(self) -> None:
        """End every request whose time is up."""
        state = self._state
        while self._heap and self._heap[0][0] <= state.now:
            entry = heapq.heappop(self._heap)
            req = self._is_due_for(entry)
            if req is None:
                continue
            seconds = entry[0] - req.arrival
            if entry[2] == ON_GRAMMAR:
                state.stats.num_grammar_timeouts += 1
                text = f"The grammar was not compiled within {seconds:g} s: the server is busy."
                state.end(req, abort_reason(text, 503))
            elif entry[2] == ON_WAITING:
                text = f"The request waited {seconds:g} s and could not start: the server is busy."
                state.end(req, abort_reason(text, 503))
            else:
                state.end(req, abort_reason(f"The request took longer than its limit of {seconds:g} s.", 504))

    def _is_due_for(self, entry: tuple[float, str, int]) -> Req | None:
        """The request that an entry is about, unless it has ended, or is past what the limit is about."""
        _, rid, which = entry
        req = self._state.requests.get(rid)
        if req is None or rid in self._state.ending or (which == ON_WAITING and req.first_scheduled is not None):
            return None
        if which == ON_GRAMMAR and req.status is not ReqStatus.GRAMMAR:
            return None
        return req
