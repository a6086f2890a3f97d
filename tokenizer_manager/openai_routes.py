"""The OpenAI routes: chat completions, completions, models."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from ..common.sampling_params import SamplingParams
from .api_error import json_response
from .call import call_of
from .chat_prompt import ChatRenderer, render_chat
from .json_body import read_json
from .openai_format import ChatFormat, CompletionFormat, Format, OpenAIResponse
from .openai_protocol import ChatCompletionRequest, CompletionRequest, OpenAIBody
from .sse import stream_events
from .tokenizer_manager import GenerateReq, TokenizerManager

CHAT = msgspec.json.Decoder(ChatCompletionRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


class OpenAIRoutes:
    """Handlers over one tokenizer manager; `renderer` is None where chat is not served."""

    def __init__(self, manager: TokenizerManager, renderer: ChatRenderer | None) -> None:
        self._manager = manager
        self._renderer = renderer
        self._created = int(time.time())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await read_json(request, CHAT)
        self._manager.check_model(body.model)
        body.check()
        self._manager.check_priority(body.priority)
        params = body.sampling_params(self._manager.vocab_size)
        with self._manager.queue_place(call_of(request), 1):
            prompt = await render_chat(
                self._renderer,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            input_ids = await self._manager.encoder.prompt_ids(
                [prompt],
                "messages",
                vocab_size=self._manager.vocab_size,
                context_len=self._manager.context_len,
                add_special_tokens=False,
            )
            return await self._answer(request, body, params, input_ids, ChatFormat())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await read_json(request, COMPLETION)
        self._manager.check_model(body.model)
        body.check()
        self._manager.check_priority(body.priority)
        params = body.sampling_params(self._manager.vocab_size)
        prompts = body.prompts()
        with self._manager.queue_place(call_of(request), len(prompts)):
            input_ids = await self._manager.encoder.prompt_ids(
                prompts, "prompt", vocab_size=self._manager.vocab_size, context_len=self._manager.context_len
            )
            return await self._answer(request, body, params, input_ids, CompletionFormat())

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
        body: OpenAIBody,
        params: SamplingParams,
        sequences: Sequence[list[int]],
        style: Format,
    ) -> web.StreamResponse:
        call = call_of(request)
        call.label = body.rid or call.label
        requests = [
            GenerateReq(
                input_ids=input_ids,
                sampling_params=params,
                label=f"{call.label}-{index}" if call.label and len(sequences) > 1 else call.label,
                cache_salt=body.cache_salt,
                priority=body.priority,
            )
            for index, input_ids in enumerate(sequences)
        ]
        answer = OpenAIResponse(style, call.request_id, body.model or self._manager.served_model_names[0])
        stream = bool(body.stream)
        with self._manager.generate(call, requests, stream=stream) as generation:
            if not stream:
                return json_response(await answer.whole(generation))
            events = answer.events(generation, include_usage=body.include_usage)
            return await stream_events(request, self._manager.metrics, events)

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
