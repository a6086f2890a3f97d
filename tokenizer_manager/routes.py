"""The table of routes."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from .control_routes import ControlRoutes
from .explain_routes import ExplainRoutes
from .generate_routes import GenerateRoutes
from .openai_routes import OpenAIRoutes
from .text_routes import TextRoutes

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

INDEX = """millstream serves {model}

{routes}

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'
"""


class Route(msgspec.Struct, frozen=True):
    """One route; `is_work` ones are refused with 503 while the server takes no work, and drained."""

    method: str
    path: str
    handler: Handler
    summary: str
    is_work: bool = False


def all_routes(
    openai: OpenAIRoutes, generate: GenerateRoutes, text: TextRoutes, control: ControlRoutes, explain: ExplainRoutes
) -> list[Route]:
    """Every route, in the order of the index page."""
    return [
        Route("POST", "/v1/chat/completions", openai.chat_completions, "OpenAI chat completion", is_work=True),
        Route("POST", "/v1/completions", openai.completions, "OpenAI text completion", is_work=True),
        Route("POST", "/generate", generate.generate, "SGLang's generation: text or input_ids", is_work=True),
        Route("POST", "/tokenize", text.tokenize, "text to token ids", is_work=True),
        Route("POST", "/detokenize", text.detokenize, "token ids to text", is_work=True),
        Route("GET", "/v1/models", openai.models, "the models that are served"),
        Route("GET", "/v1/models/{id:.+}", openai.model, "one model"),
        Route("GET", "/livez", control.livez, "200 while the server is alive"),
        Route("GET", "/readyz", control.readyz, "200 while the server takes work"),
        Route("GET", "/health", control.readyz, "the same as /readyz"),
        Route("GET", "/health_generate", control.health_generate, "generates one token", is_work=True),
        Route("GET", "/server_info", control.server_info, "arguments, model, load"),
        Route("GET", "/metrics", control.metrics, "for Prometheus"),
        Route("POST", "/flush_cache", control.flush_cache, "empties the prefix cache", is_work=True),
        Route("GET", "/flush_cache", control.flush_cache, "the same", is_work=True),
        Route("POST", "/pause_generation", control.pause_generation, "plans no step; mode: abort, retract or in_place"),
        Route("POST", "/continue_generation", control.continue_generation, "goes on after a pause"),
        Route("POST", "/abort_request", control.abort_request, "ends a request (rid), or all (abort_all)"),
        Route("GET", "/debug/requests/{rid}", explain.explain, "what became of a request, and why"),
    ]


def index_handler(model: str, routes: Sequence[Route]) -> Handler:
    """GET /: a page for a person."""
    lines = "\n".join(f"{route.method:4} {route.path.replace(':.+', ''):22} {route.summary}" for route in routes)

    async def index(request: web.Request) -> web.Response:
        url = f"{request.scheme}://{request.host.encode('ascii', 'replace').decode()}"
        return web.Response(text=INDEX.format(model=model, routes=lines, url=url))

    return index
