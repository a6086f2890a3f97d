"""OpenAI's Responses: stateless, so that what was answered can not be fetched, deleted or continued by its id."""

import msgspec
from aiohttp import web

from ..api_error import APIError, json_response
from ..call import call_of
from ..chat.chat_service import ChatService
from ..json_body import read_json
from ..sse import stream_events
from ..tokenizer_manager import TokenizerManager
from .responses_format import Response
from .responses_protocol import ResponsesRequest
from .responses_turn import ignored_tools, responses_turn

CORE_NAMES = {"messages": "input", ".function.": "."}  # of the chat core's fields
RESPONSES = msgspec.json.Decoder(ResponsesRequest)


class ResponsesRoutes:
    """Handlers over one tokenizer manager and its chats."""

    def __init__(self, manager: TokenizerManager, chat: ChatService) -> None:
        self._manager = manager
        self._chat = chat

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        try:
            return await self._answer(request, await read_json(request, RESPONSES))
        except APIError as error:
            raise error.renamed(CORE_NAMES) from None

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """Every route that asks for a response by its id."""
        raise APIError(404, "Responses are not stored here; send the whole conversation as input.", code="not_stored")

    async def _answer(self, request: web.Request, body: ResponsesRequest) -> web.StreamResponse:
        self._manager.check_model(body.model)
        self._manager.check_priority(body.priority)
        body.check()
        call = call_of(request)
        call.label = body.rid or call.label
        turn = responses_turn(body, self._manager.sampling_base, call.label)
        model = body.model or self._manager.served_model_names[0]
        response = Response(body, turn.sampling_params, call.request_id, model, ignored_tools(body))
        async with self._chat.start(call, turn) as generation:
            if not turn.stream:
                return json_response(await response.whole(generation))
            return await stream_events(
                request,
                self._manager.metrics,
                response.events(generation),
                done=b"",
                error_event=response.error_event,
            )
