"""OpenAI's Responses as they are answered: the response object, and the state that its events walk through."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from ...common.sampling_params import SamplingParams
from ...common.text_messages import StrEnd
from ..api_error import APIError
from ..chat.chat_generation import ChatGeneration
from ..chat.delta_blocks import DeltaBlocks
from ..sse import encode_named_event
from .responses_items import ItemEvents, item
from .responses_protocol import ResponsesRequest

FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class Response:
    """Writes one call's answer; `params` are those that it is sampled with."""

    def __init__(
        self, body: ResponsesRequest, params: SamplingParams, request_id: str, model: str, warnings: Sequence[str] = ()
    ) -> None:
        self._request_id = request_id
        self._fields = _echoed(body, params) | {
            "id": f"resp_{request_id}",
            "model": model,
            "created_at": int(time.time()),
        }
        if warnings:
            self._fields["warnings"] = list(warnings)
        self._blocks = DeltaBlocks()
        self._sequence_number = 0

    async def whole(self, generation: ChatGeneration) -> dict[str, Any]:
        """Wait for the end; APIError if it is a failure."""
        while not generation.done:
            _, deltas, _ = await generation.next()
            self._blocks.add(deltas)
        self._blocks.finish()
        (end,) = generation.ends
        return self._ended(generation, end)

    async def events(self, generation: ChatGeneration) -> AsyncGenerator[bytes, None]:
        """Encoded events as deltas come; all that came together leaves together. APIError at a failure."""
        opening = [self._event("response.created"), self._event("response.in_progress")]
        items = ItemEvents(self._request_id, self._encode)
        while not generation.done:
            _, deltas, end = await generation.next()
            events = opening + [event for change in self._blocks.add(deltas) for event in items.of(change)]
            if end is not None:
                items.status = _status(generation, end)
                events += [event for change in self._blocks.finish() for event in items.of(change)]
                response = self._ended(generation, end)
                events.append(self._encode({"type": f"response.{response['status']}", "response": response}))
            if batch := b"".join(events):
                yield batch
            opening = []

    def error_event(self, error: APIError) -> bytes:
        """The last events of a stream that failed."""
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        failure = {"code": FAILURE_CODES.get(error.status, "server_error"), "message": error.message}
        return self._encode(event) + self._event("response.failed", status="failed", error=failure)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._encode({"type": kind, "response": self._fields | self._output("incomplete") | fields})

    def _encode(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._sequence_number
        self._sequence_number += 1
        return encode_named_event(event)

    def _ended(self, generation: ChatGeneration, end: StrEnd) -> dict[str, Any]:
        status = _status(generation, end)
        ended: dict[str, Any] = {"status": status, "usage": usage(end, generation.reasoning_tokens)}
        if status == "incomplete":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            ended["completed_at"] = int(time.time())
        return self._fields | self._output(status) | ended

    def _output(self, last_status: str) -> dict[str, Any]:
        blocks = self._blocks.blocks
        statuses = ["completed"] * (len(blocks) - 1) + [last_status]
        items = [item(self._request_id, block, status) for block, status in zip(blocks, statuses, strict=False)]
        return {"output": items}


def usage(end: StrEnd, reasoning_tokens: int) -> dict[str, Any]:
    """Tokens, in the words of Responses."""
    input_tokens, output_tokens = end.stats.prompt_tokens, end.completion_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": end.stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }


def _status(generation: ChatGeneration, end: StrEnd) -> str:
    return "incomplete" if generation.finish_reason(0, end) == "length" else "completed"


def _echoed(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What a response repeats of its request, and what it says while nothing is known."""
    text = msgspec.to_builtins(body.text) if body.text else {}
    return {
        "object": "response",
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": text | {"format": _text_format(body)},
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in body.tools or () if tool.type == "function"],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool(tool: msgspec.Struct) -> dict[str, Any]:
    return {"strict": False} | _given(tool)


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    given = body.text.format if body.text else None
    return {"type": "text"} if given is None else _given(given)


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return {name: value for name, value in fields.items() if value is not None}
