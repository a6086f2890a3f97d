"""Anthropic's answers: messages, their event streams, usage, errors."""

import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_STR
from ...common.text_messages import StrEnd
from ..api_error import APIError
from ..chat.chat_generation import ChatGeneration
from ..chat.delta_blocks import Block, BlockKind, Change, DeltaBlocks, Step
from ..chat.partial_json import parse_object
from ..sse import encode_named_event

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
PING = encode_named_event({"type": "ping"})
MESSAGE_STOP = encode_named_event({"type": "message_stop"})


def anthropic_error(error: APIError, request_id: str) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which agents know that they have to compact
    kind = ERROR_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class AnthropicMessage:
    """Writes one call's answer. `max_tokens` is what was asked for; `warnings` are said where there are any."""

    def __init__(
        self, generation: ChatGeneration, request_id: str, model: str, *, max_tokens: int, warnings: Sequence[str] = ()
    ) -> None:
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        if warnings:
            self._head["warnings"] = list(warnings)
        self._max_tokens = max_tokens
        self._blocks = DeltaBlocks()

    async def whole(self) -> dict[str, Any]:
        """Wait for the end; APIError if it is a failure."""
        generation = self._generation
        while not generation.done:
            _, deltas, _ = await generation.next()
            self._blocks.add(deltas)
        (end,) = generation.ends
        content = [_whole_block(block) for block in self._blocks.blocks]
        return self._head | {"content": content, **self._stop(end), "usage": self._usage(end)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events as deltas come; all that came together leaves together. APIError at a failure."""
        generation, opening = self._generation, self._opening()
        while not generation.done:
            _, deltas, end = await generation.next()
            events = [opening, *map(_event, self._blocks.add(deltas))]
            if end is not None:
                events += [*map(_event, self._blocks.finish()), self._closing(end)]
            if batch := b"".join(events):
                yield batch
            opening = b""

    def _opening(self) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head | empty | {"usage": _usage(self._generation.prompt_len, 0, 0, 0)}
        return encode_named_event({"type": "message_start", "message": message}) + PING

    def _closing(self, end: StrEnd) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(end), "usage": self._usage(end)}
        return encode_named_event(delta) + MESSAGE_STOP

    def _stop(self, end: StrEnd) -> dict[str, str | None]:
        reason, matched = end.finish_reason, None
        if self._generation.finish_reason(0, end) == "tool_calls":
            why = "tool_use"
        elif isinstance(reason, FINISH_LENGTH):
            is_full = end.completion_tokens < self._max_tokens  # the limit was clamped to what the context leaves
            why = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(reason, FINISH_MATCHED_STR):
            why, matched = "stop_sequence", reason.matched
        else:
            why = "end_turn"
        return {"stop_reason": why, "stop_sequence": matched, "stop_details": None}

    def _usage(self, end: StrEnd) -> dict[str, Any]:
        """`input_tokens` are those that were not cached."""
        cached = end.stats.cached_tokens
        new = end.stats.prompt_tokens - cached
        return _usage(new, cached, end.completion_tokens, self._generation.reasoning_tokens)


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }


def _event(change: Change) -> bytes:
    step, block, text = change
    match step:
        case Step.STARTED:
            return _block_event("content_block_start", block, content_block=_empty_block(block))
        case Step.GREW:
            return _block_event("content_block_delta", block, delta=_block_delta(block, text))
        case Step.DONE:
            stop = _block_event("content_block_stop", block)
            if block.kind is not BlockKind.REASONING:
                return stop
            signature = {"type": "signature_delta", "signature": _signature(block.text)}
            return _block_event("content_block_delta", block, delta=signature) + stop


def _block_event(kind: str, block: Block, **fields: Any) -> bytes:
    return encode_named_event({"type": kind, "index": block.index, **fields})


def _empty_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.TOOL_CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _block_delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.TOOL_CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _whole_block(block: Block) -> dict[str, Any]:
    empty = _empty_block(block)
    match block.kind:
        case BlockKind.REASONING:
            return empty | {"thinking": block.text, "signature": _signature(block.text)}
        case BlockKind.TEXT:
            return empty | {"text": block.text}
        case BlockKind.TOOL_CALL:
            return empty | {"input": parse_object(block.text)}


def _signature(thinking: str) -> str:
    """Clients send it back with the thinking, and some refuse a block without; nothing here reads it."""
    return hashlib.sha256(thinking.encode(errors="surrogatepass")).hexdigest()
