"""How long a call may take until its requests are sent: its grammars, its prompt, and its turn for them count as waiting.

From then on the scheduler keeps the same limits, from the same moment.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .api_error import APIError, unavailable
from .call import Call
from .metrics import Metrics


class TimeLimits:
    """The server's, in seconds from arrival, that a call can only lower; 0: none."""

    def __init__(self, waiting_timeout: float, timeout: float, metrics: Metrics) -> None:
        self._waiting_timeout = waiting_timeout
        self._timeout = timeout
        self._metrics = metrics

    @asynccontextmanager
    async def until_sent(self, call: Call, now: float) -> AsyncIterator[None]:
        """Around a call; what is done until `call.is_sent()` ends with APIError 503 or 504 when a limit is reached."""
        seconds, error = self._limit_of(call)
        preparing = asyncio.timeout(None if seconds is None else call.arrival + seconds - now)
        try:
            async with preparing:
                call.preparing = preparing
                yield
        except TimeoutError:
            if not preparing.expired():
                raise
            self._metrics.inc("num_refused_requests_total", error.code)
            raise error from None

    def _limit_of(self, call: Call) -> tuple[float | None, APIError]:
        """The first that a call reaches, and what it is told then."""
        waiting = _lowest(self._waiting_timeout, call.waiting_timeout)
        total = _lowest(self._timeout, call.timeout)
        if waiting is not None and (total is None or waiting < total):
            message = f"The request waited {waiting:g} s and could not start: the server is busy."
            return waiting, unavailable(message, "queue_timeout")
        message = f"The request took longer than its limit of {total or 0:g} s."
        return total, APIError(504, message, code="request_timeout")


def _lowest(own: float, asked: float | None) -> float | None:
    return min((seconds for seconds in (own, asked) if seconds), default=None)
