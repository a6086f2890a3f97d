"""The OpenAI routes: chat completions, completions, models."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from ..api_error import json_response
from ..call import call_of
from ..chat.chat_service import ChatService
from ..families import GenerateReq
from ..grammar.grammar_protocol import grammar_of
from ..json_body import read_json, salt_of
from ..sse import stream_events
from ..tokenizer_manager import TokenizerManager
from .chat_protocol import ChatCompletionRequest, chat_turn
from .openai_chat_format import ChatResponse
from .openai_format import CompletionResponse
from .openai_protocol import CompletionRequest, OpenAIBody

CHAT = msgspec.json.Decoder(ChatCompletionRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


class OpenAIRoutes:
    """Handlers over one tokenizer manager and its chats."""

    def __init__(self, manager: TokenizerManager, chat: ChatService) -> None:
        self._manager = manager
        self._chat = chat
        self._created = int(time.time())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await read_json(request, CHAT)
        self._manager.check_model(body.model)
        self._manager.check_priority(body.priority)
        call = call_of(request)
        call.label = body.rid or call.label
        turn = chat_turn(body, self._manager.sampling_base, call.label)
        async with self._chat.start(call, turn) as generation:
            answer = ChatResponse(generation, call.request_id, self._model_name(body))
            if not turn.stream:
                return json_response(await answer.whole())
            events = answer.events(include_usage=body.include_usage, continuous_usage=body.continuous_usage)
            return await stream_events(request, self._manager.metrics, events)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await read_json(request, COMPLETION)
        self._manager.check_model(body.model)
        body.check()
        self._manager.check_priority(body.priority)
        params = body.sampling_params(self._manager.sampling_base)
        logprobs = body.wanted_logprobs()
        prompts, asked = body.prompts(), grammar_of(body)
        async with self._manager.queue_place(call_of(request), len(prompts) * params.n):
            grammar = await self._manager.compile_grammar(asked)
            input_ids = await self._manager.encoder.prompt_ids(
                prompts, "prompt", vocab_size=self._manager.vocab_size, context_len=self._manager.context_len
            )
            echoes = [text for text in await self._echoes(prompts) for _ in range(params.n)] if body.echo else []
            call = call_of(request)
            call.label = body.rid or call.label
            requests = [
                GenerateReq(
                    input_ids=ids,
                    sampling_params=params,
                    label=f"{call.label}-{index}" if call.label and len(prompts) > 1 else call.label,
                    cache_salt=salt_of(body.cache_salt, body.extra_key),
                    priority=body.priority,
                    logprobs=logprobs,
                    grammar=grammar,
                )
                for index, ids in enumerate(input_ids)
            ]
            return await self._answer(request, body, requests, echoes)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        cards = [self._card(name) for name in self._manager.served_model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}."""
        name = request.match_info["id"]
        self._manager.check_model(name)
        return json_response(self._card(name))

    async def _answer(
        self,
        request: web.Request,
        body: CompletionRequest,
        requests: Sequence[GenerateReq],
        echoes: Sequence[str],
    ) -> web.StreamResponse:
        call = call_of(request)
        stream, tokenizer = bool(body.stream), self._manager.encoder.tokenizer
        with self._manager.generate(call, requests, stream=stream) as generation:
            answer = CompletionResponse(generation, call.request_id, self._model_name(body), tokenizer, echoes)
            if not stream:
                return json_response(await answer.whole())
            events = answer.events(include_usage=body.include_usage, continuous_usage=body.continuous_usage)
            return await stream_events(request, self._manager.metrics, events)

    async def _echoes(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The texts of the prompts, special tokens included."""
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        texts = iter(await self._manager.encoder.decode(ids, skip_special_tokens=False))
        return [prompt if isinstance(prompt, str) else next(texts) for prompt in prompts]

    def _model_name(self, body: OpenAIBody) -> str:
        return body.model or self._manager.served_model_names[0]

    def _card(self, name: str) -> dict[str, Any]:
        model = self._manager.model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "millstream",
            "root": self._manager.served_model_names[0],
            "parent": None,
            "max_model_len": model.context_len if model is not None else None,
        }
