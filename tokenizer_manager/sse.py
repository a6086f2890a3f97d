"""Server-sent events: framing, errors in a stream, and readers that are too slow."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from .api_error import APIError, internal_error
from .call import REQUEST_ID, call_of
from .metrics import Metrics

HIGH_WATER_BYTES = 32 * 1024  # of unsent events: beyond it, new tokens wait and leave together
STALL_SECONDS = 30.0
DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


async def stream_events(
    request: web.Request, metrics: Metrics, batches: AsyncGenerator[list[Any], None]
) -> web.StreamResponse:
    """Send each batch of events as it comes, then [DONE].

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
        await stream.send([error.body()])
    except Exception:
        if not stream.is_open:
            raise
        logger.exception("request %s: the stream failed", call_of(request).name)
        await stream.send([internal_error().body()])
    return await stream.finish()


class EventStream:
    """One response of the type text/event-stream."""

    def __init__(self, request: web.Request, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        headers = {"Cache-Control": "no-store", REQUEST_ID: call_of(request).name}
        self._response = web.StreamResponse(headers=headers)
        self._response.content_type = "text/event-stream"

    @property
    def is_open(self) -> bool:
        """Whether the headers have been sent."""
        return self._response.prepared

    async def send(self, events: list[Any]) -> None:
        """Write JSON values as events, in one piece; returns when the client has taken most of what is written.

        A client that takes nothing for STALL_SECONDS is cut off: ConnectionResetError.
        """
        await self._write(b"".join([b"data: %b\n\n" % msgspec.json.encode(event) for event in events]))

    async def finish(self) -> web.StreamResponse:
        """Write [DONE] and end the body."""
        await self._write(DONE)
        await self._response.write_eof()
        return self._response

    async def _write(self, body: bytes) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._response.write(body)
                transport = self._request.transport
                if transport is not None and transport.get_write_buffer_size() > HIGH_WATER_BYTES:
                    await self._request.writer.drain()
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
