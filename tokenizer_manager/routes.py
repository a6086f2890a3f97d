"""The table of routes."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from .access import Level
from .api.anthropic_protocol import MessagesRequest, PromptBody
from .api.anthropic_routes import AnthropicRoutes
from .api.chat_protocol import ChatCompletionRequest
from .api.control_routes import ControlRoutes
from .api.embedding_route import EmbeddingRoute
from .api.embedding_service import EmbeddingRequest
from .api.explain_routes import ExplainRoutes
from .api.generate_protocol import AbortBody, GenerateBody, PauseBody
from .api.generate_routes import GenerateRoutes
from .api.openai_protocol import CompletionRequest
from .api.openai_routes import OpenAIRoutes
from .api.responses_protocol import ResponsesRequest
from .api.responses_routes import ResponsesRoutes
from .api.score_service import ScoreRequest
from .api.text_routes import DetokenizeBody, TextRoutes, TokenizeBody
from .api.ui_route import UIRoute

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

INDEX = """millstream serves {model}

{routes}

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'
"""


class Route(msgspec.Struct, frozen=True):
    """One route; `is_work` ones are refused with 503 while the server takes no work, and drained.

    `body` is the struct that its handler decodes, from which /openapi.json is made.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    level: Level
    is_work: bool = False
    body: type[msgspec.Struct] | None = None

    @property
    def plain_path(self) -> str:
        """The path without the patterns of its variables."""
        return self.path.replace(":.+", "")


def all_routes(
    openai: OpenAIRoutes,
    generate: GenerateRoutes,
    text: TextRoutes,
    control: ControlRoutes,
    explain: ExplainRoutes,
    ui: UIRoute,
    embedding: EmbeddingRoute,
    responses: ResponsesRoutes,
    anthropic: AnthropicRoutes,
) -> list[Route]:
    """Every route, in the order of the index page."""
    return [
        _work("/v1/chat/completions", openai.chat_completions, "OpenAI chat completion", ChatCompletionRequest),
        *_agent_routes(responses, anthropic),
        _work("/v1/completions", openai.completions, "OpenAI text completion", CompletionRequest),
        _work("/generate", generate.generate, "SGLang's generation: text or input_ids", GenerateBody),
        _work("/v1/embeddings", embedding.embeddings, "hidden states of the served decoder", EmbeddingRequest),
        _work("/v1/score", generate.score, "SGLang's scoring: how likely tokens are to come next", ScoreRequest),
        _work("/tokenize", text.tokenize, "text to token ids", TokenizeBody),
        _work("/detokenize", text.detokenize, "token ids to text", DetokenizeBody),
        Route("GET", "/v1/models", openai.models, "the models that are served", Level.USER),
        Route("GET", "/v1/models/{id:.+}", openai.model, "one model", Level.USER),
        Route("GET", "/ui", ui.page, "chat and live figures, in a browser", Level.PUBLIC),
        Route("GET", "/livez", control.livez, "200 while the server is alive", Level.PUBLIC),
        Route("GET", "/readyz", control.readyz, "200 while the server takes work", Level.PUBLIC),
        Route("GET", "/health", control.readyz, "the same as /readyz", Level.PUBLIC),
        Route("GET", "/health_generate", control.health_generate, "generates one token", Level.PUBLIC, is_work=True),
        Route("GET", "/server_info", control.server_info, "arguments, model, load", Level.USER),
        Route("GET", "/get_model_info", control.model_info, "SGLang's facts of the model", Level.USER),
        Route("GET", "/version", control.version, "the server's version", Level.PUBLIC),
        Route("GET", "/metrics", control.metrics, "for Prometheus", Level.PUBLIC),
        Route("POST", "/flush_cache", control.flush_cache, "empties the prefix cache", Level.ADMIN, is_work=True),
        Route(
            "POST",
            "/pause_generation",
            control.pause_generation,
            "plans no step; mode: abort, retract or in_place",
            Level.ADMIN,
            body=PauseBody,
        ),
        Route("POST", "/continue_generation", control.continue_generation, "goes on after a pause", Level.ADMIN),
        Route(
            "POST",
            "/abort_request",
            control.abort_request,
            "ends a request, or all (admin)",
            Level.USER,
            body=AbortBody,
        ),
        Route("GET", "/v1/requests", explain.running, "the requests that run: yours, or all for the admin", Level.USER),
        Route("GET", "/debug/requests/{rid}", explain.explain, "what became of a request, and why", Level.ADMIN),
    ]


def _agent_routes(responses: ResponsesRoutes, anthropic: AnthropicRoutes) -> list[Route]:
    messages, stored = anthropic.messages, responses.stored
    return [
        _work("/v1/responses", responses.responses, "OpenAI response, stateless", ResponsesRequest),
        Route("GET", "/v1/responses/{id}", stored, "404: responses are not stored", Level.USER),
        Route("DELETE", "/v1/responses/{id}", stored, "404: responses are not stored", Level.USER),
        Route("GET", "/v1/responses/{id}/input_items", stored, "404: responses are not stored", Level.USER),
        Route("POST", "/v1/responses/{id}/cancel", stored, "404: responses are not stored", Level.USER),
        _work("/v1/messages", messages, "Anthropic message", MessagesRequest),
        _work("/v1/messages/count_tokens", anthropic.count_tokens, "the tokens of a message's prompt", PromptBody),
    ]


def _work(path: str, handler: Handler, summary: str, body: type[msgspec.Struct]) -> Route:
    return Route("POST", path, handler, summary, Level.USER, is_work=True, body=body)


def index_handler(model: str, routes: Sequence[Route]) -> Handler:
    """GET /: a page for a person."""
    width = max(len(route.plain_path) for route in routes)
    lines = "\n".join(f"{route.method:6} {route.plain_path:{width}}  {route.summary}" for route in routes)

    async def index(request: web.Request) -> web.Response:
        url = f"{request.scheme}://{request.host.encode('ascii', 'replace').decode()}"
        return web.Response(text=INDEX.format(model=model, routes=lines, url=url))

    return index
