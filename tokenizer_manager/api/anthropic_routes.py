"""Anthropic's routes: messages, and how many tokens they are."""

import msgspec
from aiohttp import web

from ...common.sampling_params import SamplingParams
from ..api_error import APIError, json_response
from ..call import call_of
from ..chat.chat_service import ChatService
from ..json_body import read_json
from ..sse import encode_named_event, stream_events
from ..tokenizer_manager import TokenizerManager
from .anthropic_format import AnthropicMessage, anthropic_error
from .anthropic_protocol import MessagesRequest, PromptBody
from .anthropic_turn import anthropic_turn, ignored_tools

CORE_NAMES = {".function.parameters": ".input_schema", ".function.": "."}  # of the chat core's fields
MESSAGES = msgspec.json.Decoder(MessagesRequest)
PROMPT = msgspec.json.Decoder(PromptBody)


class AnthropicRoutes:
    """Handlers over one tokenizer manager and its chats."""

    def __init__(self, manager: TokenizerManager, chat: ChatService) -> None:
        self._manager = manager
        self._chat = chat

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        try:
            return await self._answer(request, await read_json(request, MESSAGES))
        except APIError as error:
            raise error.renamed(CORE_NAMES) from None

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens: the `input_tokens` of the same prompt as a message, cached ones included."""
        try:
            return await self._count(request, await read_json(request, PROMPT))
        except APIError as error:
            raise error.renamed(CORE_NAMES) from None

    async def _answer(self, request: web.Request, body: MessagesRequest) -> web.StreamResponse:
        self._manager.check_model(body.model)
        self._manager.check_priority(body.priority)
        body.check()
        call = call_of(request)
        call.label = body.rid or call.label
        turn = anthropic_turn(
            body,
            body.sampling_params(self._manager.sampling_base),
            stream=bool(body.stream),
            label=call.label,
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        async with self._chat.start(call, turn) as generation:
            answer = AnthropicMessage(
                generation,
                call.request_id,
                body.model or self._manager.served_model_names[0],
                max_tokens=body.max_tokens,
                warnings=ignored_tools(body),
            )
            if not turn.stream:
                return json_response(await answer.whole())

            def error_event(error: APIError) -> bytes:
                return encode_named_event(anthropic_error(error, call.name))

            events = answer.events()
            return await stream_events(request, self._manager.metrics, events, done=b"", error_event=error_event)

    async def _count(self, request: web.Request, body: PromptBody) -> web.Response:
        self._manager.check_model(body.model)
        body.check()
        async with self._manager.queue_place(call_of(request), 1):
            input_ids = await self._chat.input_ids(anthropic_turn(body, SamplingParams()))
        return json_response({"input_tokens": len(input_ids)})
