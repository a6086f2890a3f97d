"""OpenAI's chat completions, as a whole or in chunks: a role chunk, deltas, a finish chunk."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ...common.text_messages import StrEnd
from ..chat.chat_generation import ChatGeneration
from ..chat.delta import ChatMessageSum, Delta, ToolCallDelta
from ..sse import TEXT, EventTemplate, encode_event
from .openai_format import FINGERPRINT, matched_stop, usage, usage_so_far

ID_PREFIX = "chatcmpl-"


class ChatResponse:
    """Writes one call's answer; the id and the time of creation are the same in all its chunks."""

    def __init__(self, generation: ChatGeneration, request_id: str, model: str) -> None:
        self._generation = generation
        self._id = ID_PREFIX + request_id
        self._model = model
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """Wait for every end; APIError if one of them is a failure."""
        generation = self._generation
        messages = [ChatMessageSum() for _ in range(generation.num_choices)]
        ends: dict[int, StrEnd] = {}
        while not generation.done:
            index, deltas, end = await generation.next()
            messages[index].add(deltas)
            if end is not None:
                ends[index] = end
        choices = [self._choice(index, message, ends[index]) for index, message in enumerate(messages)]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    async def events(self, *, include_usage: bool, continuous_usage: bool = False) -> AsyncGenerator[bytes, None]:
        """Encoded chunks as outputs come; all that came together leaves together. APIError at a failure.

        The last one has the usage with `include_usage`, the others that of all so far with `continuous_usage`.
        """
        generation = self._generation
        head = self._head("chat.completion.chunk") | ({"usage": None} if include_usage else {})
        streams: dict[int, ChoiceStream] = {}
        while not generation.done:
            index, deltas, end = await generation.next()
            stream = streams.get(index) or streams.setdefault(index, ChoiceStream(head, index))
            if continuous_usage:
                stream.set_head(head | {"usage": usage_so_far(generation.reqs)})
            chunks = stream.chunks(deltas)
            if end is not None:
                chunks += stream.last_chunk(generation.finish_reason(index, end), end)
            if chunks:
                yield chunks
        if include_usage:
            yield encode_event(head | {"choices": [], "usage": self._usage()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }

    def _choice(self, index: int, message: ChatMessageSum, end: StrEnd) -> dict[str, Any]:
        reason = self._generation.finish_reason(index, end)
        logprobs = None if message.logprobs is None else _logprobs(message.logprobs)
        choice = {"index": index, "message": message_fields(message), "logprobs": logprobs, "finish_reason": reason}
        return choice | {"matched_stop": matched_stop(end)}

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation.reqs, self._generation.reasoning_tokens)


class ChoiceStream:
    """The chunks of one choice; `head` is what all chunks of the call begin with."""

    def __init__(self, head: dict[str, Any], index: int) -> None:
        self._index = index
        self._is_open = False
        self.set_head(head)

    def set_head(self, head: dict[str, Any]) -> None:
        """Begin the next chunks with this."""
        self._head = head
        self._content_chunk = EventTemplate(self._chunk({"content": TEXT}, None))

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The chunks of these deltas; may be none."""
        opening = b"" if self._is_open else self._encode({"role": "assistant", "content": ""})
        self._is_open = True
        return opening + b"".join([self._delta_chunk(delta) for delta in deltas])

    def last_chunk(self, finish_reason: str, end: StrEnd) -> bytes:
        """The chunk that says how the choice ended."""
        return self._encode({}, finish={"finish_reason": finish_reason, "matched_stop": matched_stop(end)})

    def _delta_chunk(self, delta: Delta) -> bytes:
        if delta.content and not delta.reasoning and not delta.tool_calls and delta.logprobs is None:
            return self._content_chunk.fill(delta.content)  # the common case: all around the text is encoded once
        logprobs = None if delta.logprobs is None else _logprobs(delta.logprobs)
        return self._encode(delta_fields(delta), logprobs)

    def _encode(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: dict[str, Any] | None = None
    ) -> bytes:
        return encode_event(self._chunk(delta, logprobs, finish))

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | (finish or {})
        return self._head | {"choices": [choice]}


def message_fields(message: ChatMessageSum) -> dict[str, Any]:
    """The assistant's message. Reasoning stands under both of its names in use."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    content = None if calls and not message.content else message.content
    fields: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        fields |= _reasoning_fields(message.reasoning)
    return fields | ({"tool_calls": calls} if calls else {})


def delta_fields(delta: Delta) -> dict[str, Any]:
    """The `delta` of a chunk."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields |= _reasoning_fields(delta.reasoning)
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [_call_fields(call) for call in delta.tool_calls]
    return fields


def _reasoning_fields(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}


def _call_fields(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"content": list(entries), "refusal": None}
