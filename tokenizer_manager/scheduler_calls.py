"""Messages to the scheduler that wait for its answer: control, and questions about requests."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

from ..common.links import ControlReply, ControlReqInput
from .api_error import APIError, unavailable

ANSWER_SECONDS = 30.0  # a pause is answered when the steps in flight are back

R = TypeVar("R", bound=ControlReply)

logger = logging.getLogger(__name__)


class SchedulerCalls:
    """Matches answers with those who wait for them. `send` hands a message to the scheduler without blocking."""

    def __init__(self, send: Callable[[ControlReqInput], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}

    async def ask(self, make: Callable[[str], ControlReqInput], answer: type[R]) -> R:
        """Send what `make` makes of a new id; the answer to it. APIError if none comes, or the server fails."""
        request_id = secrets.token_hex(8)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._send(make(request_id))
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await future
        except TimeoutError:
            message = f"The scheduler has not answered within {ANSWER_SECONDS:g} s; it may still do what was asked."
            raise APIError(504, message, code="control_timeout") from None
        finally:
            del self._waiting[request_id]
        assert isinstance(reply, answer)
        return reply

    def on_reply(self, reply: ControlReply) -> None:
        """An answer has come."""
        future = self._waiting.get(reply.request_id)
        if future is None:
            logger.warning("an answer of the scheduler came for nobody: %s", type(reply).__name__)
        elif not future.done():
            future.set_result(reply)

    def fail_all(self, message: str) -> None:
        """The server can not go on: no answer will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(unavailable(message, "engine_failed", close=True))
