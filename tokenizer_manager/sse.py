"""Server-sent events: framing, errors in a stream, silence, and readers that are too slow.

What a reader does not take waits: at most NOT_SENT_BYTES in the kernel (http_server.py) and HIGH_WATER_BYTES here
(slow_clients.py) are events already, and of all that comes after them one event is made when the reader goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from .api_error import APIError, internal_error
from .call import call_of, id_headers
from .metrics import Metrics
from .slow_clients import HIGH_WATER_BYTES, cut_off_if_stalled, num_waiting

KEEP_ALIVE_SECONDS = web.AppKey("keep_alive_seconds", float)  # of silence; 0: no comments
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
TEXT = "\0"  # stands for the text of a template: no name and no id has it

logger = logging.getLogger(__name__)


def encode_event(value: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def encode_named_event(value: Mapping[str, Any]) -> bytes:
    """One event that has its value's `type` for a name, as OpenAI's Responses and Anthropic's messages do."""
    return b"event: %b\n%b" % (value["type"].encode(), encode_event(value))


class EventTemplate:
    """An event that is sent again and again, each time with another text: all around the text is encoded once."""

    def __init__(self, event: Any) -> None:
        """`event` has TEXT in the text's place, once."""
        self._before, self._after = encode_event(event).split(msgspec.json.encode(TEXT))

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + msgspec.json.encode(text) + self._after


def _error_event(error: APIError) -> bytes:
    return encode_event(error.body())


async def stream_events(
    request: web.Request,
    metrics: Metrics,
    batches: AsyncGenerator[bytes, None],
    *,
    done: bytes = DONE,
    error_event: Callable[[APIError], bytes] = _error_event,
) -> web.StreamResponse:
    """Send each batch of encoded events as it comes, then `done`.

    The headers go out with the first batch, so that an APIError before it is still an HTTP status (it is raised).
    An error after it, or after a keep-alive comment, is the stream's last event, with no `done` behind it.
    """
    with EventStream(request, metrics) as stream:
        try:
            async with aclosing(batches):
                async for events in batches:
                    await stream.send(events)
        except ConnectionError:
            raise
        except APIError as error:
            if not stream.is_open:
                raise
            await stream.send(error_event(error))
            done = b""
        except Exception:
            if not stream.is_open:
                raise
            logger.exception("request %s: the stream failed", call_of(request).name)
            await stream.send(error_event(internal_error()))
            done = b""
        return await stream.finish(done)


class EventStream:
    """One response of the type text/event-stream. Within its context, silence is filled with comments."""

    def __init__(self, request: web.Request, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **id_headers(request)}
        self._response = web.StreamResponse(headers=headers)
        self._response.content_type = "text/event-stream"
        self._writer: StreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._keeping_alive: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        seconds = self._request.app[KEEP_ALIVE_SECONDS]
        if seconds:
            self._keeping_alive = self._loop.create_task(self._keep_alive(seconds))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()

    @property
    def is_open(self) -> bool:
        """Whether the headers have been sent."""
        return self._response.prepared

    async def send(self, events: bytes) -> None:
        """Write encoded events, in one piece; returns when the client has taken most of what is written."""
        writer = await self._write(events)
        if num_waiting(self._request) > HIGH_WATER_BYTES:
            with cut_off_if_stalled(self._request, self._metrics):
                await writer.drain()

    async def finish(self, done: bytes) -> web.StreamResponse:
        """Write the last event and end the body."""
        if done:
            await self.send(done)
        elif self._writer is None:
            await self._open()
        with cut_off_if_stalled(self._request, self._metrics):
            await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> StreamWriter:
        writer = self._writer or await self._open()
        self._last_sent = self._loop.time()
        await writer.write(data, drain=False)
        return writer

    async def _open(self) -> StreamWriter:
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        return writer

    async def _keep_alive(self, seconds: float) -> None:
        """Send a comment whenever nothing was sent for so long, unless the client has not taken what was."""
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(self._last_sent + seconds - self._loop.time())
                if self._loop.time() < self._last_sent + seconds:
                    continue
                if self._writer is None or not num_waiting(self._request):
                    await self._write(KEEP_ALIVE)
                else:
                    self._last_sent = self._loop.time()
