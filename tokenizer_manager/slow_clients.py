"""Clients that read too slowly: what a client does not take is not held for ever, in a stream or in a whole answer."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from aiohttp import web

from .call import call_of
from .metrics import Metrics

HIGH_WATER_BYTES = 2 * 1024  # that wait here for the kernel: beyond it, the rest waits for the client
STALL_SECONDS = 30.0
STALL_BYTES = 64 * 1024  # a client that has more to take takes so much within STALL_SECONDS

logger = logging.getLogger(__name__)


def num_waiting(request: web.BaseRequest) -> int:
    """Bytes of the response that the kernel has not taken."""
    return request.transport.get_write_buffer_size() if request.transport is not None else 0


async def send_whole(request: web.Request, response: web.StreamResponse, metrics: Metrics) -> None:
    """Send a response that is complete; returns when the client has taken most of it."""
    with cut_off_if_stalled(request, metrics):
        await response.prepare(request)
        await response.write_eof()


@contextlib.contextmanager
def cut_off_if_stalled(request: web.Request, metrics: Metrics) -> Iterator[None]:
    """Around a wait for the client to read: one that hardly does is cut off, which cancels the handler."""
    watch = _Watch(request, metrics)
    try:
        yield
    finally:
        watch.end()


class _Watch:
    """Looks every STALL_SECONDS at how much was taken."""

    def __init__(self, request: web.Request, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._num_taken = self._count_taken()
        self._timer = self._loop.call_later(STALL_SECONDS, self._look)

    def end(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _count_taken(self) -> int:
        return self._request.writer.output_size - num_waiting(self._request)

    def _look(self) -> None:
        num_taken = self._count_taken()
        if num_taken - self._num_taken < STALL_BYTES:
            self._cut_off()
        else:
            self._num_taken = num_taken
            self._timer = self._loop.call_later(STALL_SECONDS, self._look)

    def _cut_off(self) -> None:
        self._metrics.inc("slow_clients_total")
        name = call_of(self._request).name
        logger.warning("request %s: cut off, the client has hardly read for %g s", name, STALL_SECONDS)
        if self._request.transport is not None:
            self._request.transport.abort()
