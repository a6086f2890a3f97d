"""aiohttp's server, made to our rules: its own errors are JSON, and neither heads nor writes may stall for ever."""

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong, PayloadEncodingError
from aiohttp.web_protocol import RequestHandler

from .api_error import APIError, http_error, internal_error
from .slow_clients import HIGH_WATER_BYTES

HEAD_SECONDS = 10.0
KEEPALIVE_SECONDS = 75.0
SEND_BUFFER_BYTES = 64 * 1024
UNTAKEN_SECONDS = 30.0  # after which the kernel ends a connection whose peer takes nothing, or is no longer there
NOT_SENT_BYTES = 4 * 1024  # that the kernel takes beyond what the client has room for

logger = logging.getLogger(__name__)


class HTTPRunner(web.AppRunner):
    """An AppRunner whose handlers are cancelled when their client goes away. Use it with `web.SockSite`."""

    def __init__(self, app: web.Application, *, shutdown_timeout: float = 0.1) -> None:
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_SECONDS,
            shutdown_timeout=shutdown_timeout,
            lingering_time=1.0,
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await server.request_handler(request)
            except web.HTTPException as error:  # of aiohttp itself, outside of all handlers
                return http_error(error.status, close=True).response()

        return _Server(handle, request_factory=server.request_factory, **self._kwargs)


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """One connection."""

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # uvloop's transports do not derive from asyncio's
        cast("asyncio.WriteTransport", transport).set_write_buffer_limits(high=HIGH_WATER_BYTES)
        connected = transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNTAKEN_SECONDS * 1000))

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests:
            self._stop_head_timer()
        elif self._is_between_requests and self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_SECONDS, self._on_head_timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not parse, or what escaped every handler; headers are never echoed."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response is sent already")
        if isinstance(exc, LineTooLong):
            error = http_error(431, close=True)
        elif isinstance(exc, ContentEncodingError):
            error = http_error(415, close=True)
        elif status < HTTPStatus.INTERNAL_SERVER_ERROR:
            error = http_error(status, close=True)
        else:
            logger.error("an HTTP request failed", exc_info=exc)
            error = internal_error()
        response = error.response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that a client sent broken has had its 400, and is no fault of ours."""
        if not isinstance(kw.get("exc_info"), PayloadEncodingError | web.RequestPayloadError):
            super().log_exception(*args, **kw)

    @property
    def _is_between_requests(self) -> bool:
        return self._current_request is None and not self._messages

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._is_between_requests or self.transport is None:
            return
        self.transport.write(_raw_response(http_error(408)))
        self.force_close()


def _raw_response(error: APIError) -> bytes:
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
