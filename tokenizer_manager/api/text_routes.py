"""Text to token ids and back: /tokenize, /detokenize, in SGLang's and vLLM's shapes."""

from typing import Any

import msgspec
from aiohttp import web

from ...common.sampling_params import SamplingParams
from ..api_error import bad_request, json_response
from ..call import call_of
from ..chat.chat_prompt import ChatMessage, template_messages
from ..chat.chat_service import ChatService, ChatTurn
from ..json_body import read_json
from ..prompt_encoder import check_ids
from ..tokenizer_manager import TokenizerManager
from .chat_protocol import Tool, template_tool
from .openai_protocol import split_prompts

MAX_TEXTS = 4096


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt`, or `messages` (vLLM's) as /v1/chat/completions would tokenize them."""

    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # true for prompts, false for messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


TOKENIZE = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class TextRoutes:
    """Handlers over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager, chat: ChatService) -> None:
        self._manager = manager
        self._chat = chat

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        body = await read_json(request, TOKENIZE)
        self._manager.check_model(body.model)
        async with self._manager.queue_place(call_of(request), 1):
            given = await self._text(body)
            texts = [given] if isinstance(given, str) else given
            if len(texts) > MAX_TEXTS:
                raise bad_request(f"prompt holds at most {MAX_TEXTS} texts, not {len(texts)}", "prompt")
            add_special_tokens = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
            found = await self._manager.encoder.encode(texts, add_special_tokens=add_special_tokens)
        single = isinstance(given, str)
        counts = [len(ids) for ids in found]
        return json_response(
            {
                "tokens": found[0] if single else found,
                "count": counts[0] if single else counts,
                "max_model_len": self._manager.context_len,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize; the text stands under SGLang's name and under vLLM's."""
        body = await read_json(request, DETOKENIZE)
        self._manager.check_model(body.model)
        single = not body.tokens or isinstance(body.tokens[0], int)
        sequences: list[Any] = split_prompts(body.tokens, "tokens", MAX_TEXTS) if body.tokens else [[]]
        for ids in sequences:
            if ids:
                check_ids(ids, "tokens", self._manager.vocab_size)
        async with self._manager.queue_place(call_of(request), 1):
            texts = await self._manager.encoder.decode(sequences, skip_special_tokens=body.skip_special_tokens)
        text = texts[0] if single else texts
        return json_response({"text": text, "prompt": text})

    async def _text(self, body: TokenizeBody) -> str | list[str]:
        if body.messages is not None:
            turn = ChatTurn(
                messages=template_messages(body.messages),
                tools=[template_tool(tool) for tool in body.tools or ()],
                sampling_params=SamplingParams(),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            return await self._chat.prompt(turn)
        if body.prompt is None:
            raise bad_request("prompt is required", "prompt", "missing_field")
        return body.prompt
