"""Server-sent events: framing, errors in a stream, and readers that are too slow.

What a reader does not take waits: at most NOT_SENT_BYTES in the kernel (http_server.py) and HIGH_WATER_BYTES here are
events already, and of all that comes after them one event is made when the reader goes on.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_writer import StreamWriter

from .api_error import APIError, internal_error
from .call import REQUEST_ID, call_of
from .metrics import Metrics

HIGH_WATER_BYTES = 2 * 1024  # of events that the kernel has not taken: beyond it, new tokens wait and leave together
STALL_SECONDS = 30.0
DONE = b"data: [DONE]\n\n"
TEXT = "\0"  # stands for the text of a template: no name and no id has it

logger = logging.getLogger(__name__)


def encode_event(value: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


class EventTemplate:
    """An event that is sent again and again, each time with another text: all around the text is encoded once."""

    def __init__(self, event: Any) -> None:
        """`event` has TEXT in the text's place, once."""
        self._before, self._after = encode_event(event).split(msgspec.json.encode(TEXT))

    def fill(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + msgspec.json.encode(text) + self._after


async def stream_events(
    request: web.Request, metrics: Metrics, batches: AsyncGenerator[bytes, None]
) -> web.StreamResponse:
    """Send each batch of encoded events as it comes, then [DONE].

    The headers go out with the first batch, so that an APIError before it is still an HTTP status (it is raised).
    An error after it is the stream's last event.
    """
    stream = EventStream(request, metrics)
    try:
        async with aclosing(batches):
            async for events in batches:
                await stream.send(events)
    except ConnectionError:
        raise
    except APIError as error:
        if not stream.is_open:
            raise
        await stream.send(encode_event(error.body()))
    except Exception:
        if not stream.is_open:
            raise
        logger.exception("request %s: the stream failed", call_of(request).name)
        await stream.send(encode_event(internal_error().body()))
    return await stream.finish()


class EventStream:
    """One response of the type text/event-stream."""

    def __init__(self, request: web.Request, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        headers = {"Cache-Control": "no-store", REQUEST_ID: call_of(request).name}
        self._response = web.StreamResponse(headers=headers)
        self._response.content_type = "text/event-stream"
        self._writer: StreamWriter | None = None

    @property
    def is_open(self) -> bool:
        """Whether the headers have been sent."""
        return self._response.prepared

    async def send(self, events: bytes) -> None:
        """Write encoded events, in one piece; returns when the client has taken most of what is written.

        A client that takes nothing for STALL_SECONDS is cut off: ConnectionResetError.
        """
        writer = self._writer or await self._open()
        await writer.write(events, drain=False)
        transport = writer.transport
        if transport is not None and transport.get_write_buffer_size() > HIGH_WATER_BYTES:
            await self._drain(writer)

    async def finish(self) -> web.StreamResponse:
        """Write [DONE] and end the body."""
        await self.send(DONE)
        await self._response.write_eof()
        return self._response

    async def _open(self) -> StreamWriter:
        writer = await self._response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        return writer

    async def _drain(self, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await writer.drain()
        except TimeoutError:
            self._cut_off()
            raise ConnectionResetError("the client reads too slowly") from None

    def _cut_off(self) -> None:
        self._metrics.inc("slow_clients_total")
        logger.warning(
            "request %s: cut off, the client has not read for %g s", call_of(self._request).name, STALL_SECONDS
        )
        if self._request.transport is not None:
            self._request.transport.abort()
