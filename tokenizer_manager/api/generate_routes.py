"""SGLang's own routes for work: /generate and /v1/score."""

from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from ..api_error import json_response
from ..call import call_of
from ..json_body import read_json
from ..sse import encode_event, stream_events
from ..tokenizer_manager import TokenizerManager
from .generate_protocol import GenerateBody
from .generate_service import GenerateAnswers, GenerateService
from .score_service import ScoreRequest, ScoreService

GENERATE = msgspec.json.Decoder(GenerateBody)
SCORE = msgspec.json.Decoder(ScoreRequest)


class GenerateRoutes:
    """Handlers over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._service = GenerateService(manager)
        self._scores = ScoreService(manager)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        body = await read_json(request, GENERATE)
        async with self._service.start(call_of(request), body) as answers:
            if body.stream:
                return await stream_events(request, self._manager.metrics, _events(answers))
            return json_response(await answers.whole())

    async def score(self, request: web.Request) -> web.Response:
        """POST /v1/score."""
        body = await read_json(request, SCORE)
        return json_response(await self._scores.score(call_of(request), body))


async def _events(answers: GenerateAnswers) -> AsyncGenerator[bytes, None]:
    async for event in answers.events():
        yield encode_event(event)
