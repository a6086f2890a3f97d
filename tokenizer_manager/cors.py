"""What a browser asks and must be told before a page of another site may read an answer (--allowed-origins)."""

from aiohttp import web

from .access import Access

METHODS = "GET, POST, DELETE"
EXPOSED = "X-Request-Id, Retry-After"
PREFLIGHT_SECONDS = "600"


def add_cors(app: web.Application, access: Access) -> None:
    """Name the page's site in every answer that is for a site which is allowed."""

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin", "")
        if access.allows_origin(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
            response.headers["Vary"] = "Origin"

    app.on_response_prepare.append(name_origin)


def preflight(request: web.Request, access: Access) -> web.Response | None:
    """The answer to the question that a browser asks before such a call; None for every other request."""
    is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_question or not access.allows_origin(request.headers.get("Origin", "")):
        return None
    headers = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
        "Access-Control-Max-Age": PREFLIGHT_SECONDS,
    }
    return web.Response(status=204, headers=headers)
