"""The HTTP application: the routes, and what happens around every handler."""

import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from .access import Access, Caller, Level
from .api.anthropic_format import anthropic_error
from .api.anthropic_routes import AnthropicRoutes
from .api.control_routes import ControlRoutes
from .api.embedding_route import EmbeddingRoute
from .api.explain_routes import ExplainRoutes
from .api.generate_routes import GenerateRoutes
from .api.openai_routes import OpenAIRoutes
from .api.openapi import openapi_handler
from .api.responses_routes import ResponsesRoutes
from .api.text_routes import TextRoutes
from .api.ui_route import UIRoute
from .api_error import CLIENT_CLOSED, APIError, http_error, internal_error, too_deep
from .call import Call, call_of, id_headers, is_anthropic, new_call, read_headers
from .chat.chat_family import ChatFamily
from .chat.chat_prompt import ChatRenderer
from .chat.chat_service import ChatService
from .cors import add_cors, preflight
from .json_body import STRICT_PARAMS
from .metrics import Metrics
from .routes import Handler, Route, all_routes, index_handler
from .slow_clients import send_whole
from .sse import KEEP_ALIVE_SECONDS
from .tokenizer_manager import TokenizerManager

UNKNOWN_ROUTE = "unknown"

logger = logging.getLogger(__name__)


def build_app(
    manager: TokenizerManager,
    renderer: ChatRenderer | None,
    *,
    family: ChatFamily | None = None,
    info: Mapping[str, Any] | None = None,
    access: Access | None = None,
    max_body_bytes: int,
    strict_params: bool = False,
    keep_alive_seconds: float = 15.0,
) -> web.Application:
    """The application over a manager. `renderer` is None without chat, `family` says how the model writes; `info` is shown by /server_info.

    `access` is open to all where it is not given. A stream that has sent nothing for `keep_alive_seconds` sends a
    comment (0: it does not).
    """
    chat = ChatService(manager, renderer, family or ChatFamily())
    routes = all_routes(
        OpenAIRoutes(manager, chat),
        GenerateRoutes(manager),
        TextRoutes(manager, chat),
        ControlRoutes(manager, info or {}),
        ExplainRoutes(manager),
        UIRoute(),
        EmbeddingRoute(manager),
        ResponsesRoutes(manager, chat),
        AnthropicRoutes(manager, chat),
    )
    routes.append(Route("GET", "/openapi.json", openapi_handler(routes), "this API, for programs", Level.PUBLIC))
    routes.append(Route("GET", "/", index_handler(manager.served_model_names[0], routes), "this page", Level.PUBLIC))
    access = access or Access()
    guard = _Guard(access)
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_around(manager, guard)])
    app[STRICT_PARAMS], app[KEEP_ALIVE_SECONDS] = strict_params, keep_alive_seconds
    add_cors(app, access)
    for route in routes:
        handler = _admitted(manager, route.handler) if route.is_work else route.handler
        for method in (route.method, "HEAD") if route.method == "GET" else (route.method,):
            guard.levels[app.router.add_route(method, route.path, handler, expect_handler=_expect)] = route.level
    manager.metrics.add_routes([*(resource.canonical for resource in app.router.resources()), UNKNOWN_ROUTE])
    return app


def _admitted(manager: TokenizerManager, handler: Handler) -> Handler:
    """Refuse work while the server takes none, and count what is open."""

    async def admit(request: web.Request) -> web.StreamResponse:
        with manager.open_call():
            return await handler(request)

    return admit


class _Guard:
    """Lets a request in, or not: it decides by the route that was matched, whatever its path looked like."""

    def __init__(self, access: Access) -> None:
        self.levels: dict[web.AbstractRoute, Level] = {}
        self.access = access

    def check(self, request: web.Request) -> Caller:
        """Who calls; APIError if they may not. A path without a route has its 404 or 405 from its handler."""
        if request.version.major < 1:
            raise http_error(400, close=True)
        self.access.check_source(request)
        if request.match_info.http_exception is not None:
            return Caller()
        return self.access.check_key(self.levels[request.match_info.route], request.headers)


def _around(manager: TokenizerManager, guard: _Guard) -> Any:
    """The middleware: who calls, ids, errors in the one shape, counters."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        call = new_call(request, manager.clock())
        route = _route_of(request)
        manager.metrics.inc("http_requests_total", route)
        status = CLIENT_CLOSED
        try:
            response = await _answer(request, handler, call, guard)
            status = response.status
        finally:
            _count(manager.metrics, route, status)
        if not response.prepared:
            response.headers.update(id_headers(request))
            await send_whole(request, response, manager.metrics)
        return response

    return around


async def _answer(request: web.Request, handler: Handler, call: Call, guard: _Guard) -> web.StreamResponse:
    try:
        call.caller = guard.check(request)
        if (answer := preflight(request, guard.access)) is not None:
            return answer
        read_headers(call, request.headers)
        return await handler(request)
    except APIError as error:
        return _refuse(request, error)
    except web.HTTPException as error:
        allow = error.headers.get("Allow")
        return _refuse(request, http_error(error.status, {"Allow": allow} if allow else None))
    except ConnectionError:
        raise
    except RecursionError:  # bodies are the only nested values here
        return _refuse(request, too_deep())
    except Exception:
        logger.exception("request %s: failed in %s", call.name, _route_of(request))
        return _refuse(request, internal_error())


def _refuse(request: web.Request, error: APIError) -> web.Response:
    """An error in the shape that the client's API gives to errors."""
    return error.response(anthropic_error(error, call_of(request).name) if is_anthropic(request) else None)


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
