"""The HTTP application: the routes, and what happens around every handler."""

import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from .api_error import CLIENT_CLOSED, APIError, http_error, internal_error
from .call import REQUEST_ID, Call, new_call, read_headers
from .chat_prompt import ChatRenderer
from .control_routes import ControlRoutes
from .explain_routes import ExplainRoutes
from .generate_routes import GenerateRoutes
from .metrics import Metrics
from .openai_routes import OpenAIRoutes
from .routes import Handler, Route, all_routes, index_handler
from .text_routes import TextRoutes
from .tokenizer_manager import TokenizerManager

UNKNOWN_ROUTE = "unknown"

logger = logging.getLogger(__name__)


def build_app(
    manager: TokenizerManager,
    renderer: ChatRenderer | None,
    *,
    info: Mapping[str, Any] | None = None,
    max_body_bytes: int,
) -> web.Application:
    """The application over a manager. `renderer` is None without chat; `info` is shown by /server_info."""
    routes = all_routes(
        OpenAIRoutes(manager, renderer),
        GenerateRoutes(manager),
        TextRoutes(manager, renderer),
        ControlRoutes(manager, info or {}),
        ExplainRoutes(manager),
    )
    routes.append(Route("GET", "/", index_handler(manager.served_model_names[0], routes), "this page"))
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_around(manager)])
    for route in routes:
        handler = _admitted(manager, route.handler) if route.is_work else route.handler
        app.router.add_route(route.method, route.path, handler, expect_handler=_expect)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, handler, expect_handler=_expect)
    manager.metrics.add_routes([*(resource.canonical for resource in app.router.resources()), UNKNOWN_ROUTE])
    return app


def _admitted(manager: TokenizerManager, handler: Handler) -> Handler:
    """Refuse work while the server takes none, and count what is open."""

    async def admit(request: web.Request) -> web.StreamResponse:
        with manager.open_call():
            return await handler(request)

    return admit


def _around(manager: TokenizerManager) -> Any:
    """The middleware: ids, errors in the one shape, counters."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        call = new_call(request, manager.clock())
        route = _route_of(request)
        manager.metrics.inc("http_requests_total", route)
        status = CLIENT_CLOSED
        try:
            response = await _answer(request, handler, call)
            status = response.status
        finally:
            _count(manager.metrics, route, status)
        if not response.prepared:
            response.headers[REQUEST_ID] = call.name
        return response

    return around


async def _answer(request: web.Request, handler: Handler, call: Call) -> web.StreamResponse:
    try:
        if request.version.major < 1:
            raise http_error(400, close=True)
        read_headers(call, request.headers)
        return await handler(request)
    except APIError as error:
        return error.response()
    except web.HTTPException as error:
        allow = error.headers.get("Allow")
        return http_error(error.status, {"Allow": allow} if allow else None).response()
    except ConnectionError:
        raise
    except Exception:
        logger.exception("request %s: failed in %s", call.name, _route_of(request))
        return internal_error().response()


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`, unless the body is refused already."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return http_error(417, close=True).response()
    if (request.content_length or 0) <= request.client_max_size:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # what follows is a whole response
    return None


def _route_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNKNOWN_ROUTE


def _count(metrics: Metrics, route: str, status: int) -> None:
    metrics.inc("http_responses_total", route, f"{status // 100}xx")
