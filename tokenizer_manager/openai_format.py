"""OpenAI's answers: chunks of streams, whole responses, usage."""

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from .. import __version__
from ..common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from ..common.text_messages import StrEnd
from .accounting import error_code
from .api_error import APIError
from .req_state import CLIENT_ABORT, Generation, ReqState
from .sse import TEXT, EventTemplate, encode_event

FINGERPRINT = f"millstream-{__version__}"


class Format(Protocol):
    """How one of the two routes writes its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def first_choices(self, index: int) -> list[dict[str, Any]]:
        """What comes ahead of the first text, one choice a chunk."""

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """Some text, and no end."""

    def last_choices(self, index: int, text: str, end: StrEnd) -> list[dict[str, Any]]:
        """The last text and the end, one choice a chunk."""

    def choice(self, index: int, text: str, end: StrEnd) -> dict[str, Any]:
        """The choice of a whole response."""


class ChatFormat:
    """POST /v1/chat/completions: a role chunk, deltas, a finish chunk."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_choices(self, index: int) -> list[dict[str, Any]]:
        """See Format."""
        return [_chat_delta({"role": "assistant", "content": ""})]

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """See Format."""
        return _chat_delta({"content": text})

    def last_choices(self, index: int, text: str, end: StrEnd) -> list[dict[str, Any]]:
        """See Format."""
        last = _chat_delta({}) | finish_fields(end)
        return [self.text_choice(index, text), last] if text else [last]

    def choice(self, index: int, text: str, end: StrEnd) -> dict[str, Any]:
        """See Format."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None} | finish_fields(end)


class CompletionFormat:
    """POST /v1/completions: texts, the last of each choice with its finish reason."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def first_choices(self, index: int) -> list[dict[str, Any]]:
        """See Format."""
        return []

    def text_choice(self, index: int, text: str) -> dict[str, Any]:
        """See Format."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def last_choices(self, index: int, text: str, end: StrEnd) -> list[dict[str, Any]]:
        """See Format."""
        return [self.choice(index, text, end)]

    def choice(self, index: int, text: str, end: StrEnd) -> dict[str, Any]:
        """See Format."""
        return {"index": index, "text": text, "logprobs": None} | finish_fields(end)


def finish_fields(end: StrEnd) -> dict[str, Any]:
    """`finish_reason`, and SGLang's `matched_stop`: the token id, string or pattern that ended the text."""
    reason = end.finish_reason
    if isinstance(reason, FINISH_LENGTH):
        return {"finish_reason": "length", "matched_stop": None}
    if isinstance(reason, FINISH_ABORT):
        return {"finish_reason": "abort", "matched_stop": None}
    return {"finish_reason": "stop", "matched_stop": reason.matched}


def usage(ends: Iterable[StrEnd]) -> dict[str, Any]:
    """Tokens of all choices together."""
    ends = list(ends)
    prompt_tokens = sum(end.stats.prompt_tokens for end in ends)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.stats.cached_tokens for end in ends)},
    }


def failure(req: ReqState, end: StrEnd | None) -> APIError | None:
    """The error that an aborted request is answered with; None for every other end, and before it."""
    if end is None or not isinstance(end.finish_reason, FINISH_ABORT):
        return None
    reason = end.finish_reason
    status = reason.status_code if 400 <= reason.status_code < 600 else 500
    code = "request_aborted" if status == CLIENT_ABORT else error_code(reason)
    headers = {"Retry-After": str(req.retry_seconds)} if status in {429, 503} else {}
    return APIError(status, reason.message, code=code, headers=headers)


class OpenAIResponse:
    """Writes one call's answer; the id and the time of creation are the same in all its chunks."""

    def __init__(self, style: Format, request_id: str, model: str) -> None:
        self._style = style
        self._id = style.id_prefix + request_id
        self._model = model
        self._created = int(time.time())

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Wait for every end; APIError if one of them is a failure."""
        texts = [""] * len(generation.reqs)
        while not generation.done:
            req, output = await generation.next()
            texts[req.index] += output.text
            error = failure(req, output.end)
            if error is not None:
                raise error
        ends = final_ends(generation)
        choices = [self._style.choice(index, texts[index], end) for index, end in enumerate(ends)]
        return self._head(self._style.object) | {"choices": choices, "usage": usage(ends)}

    async def events(self, generation: Generation, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Encoded chunks as outputs come; all that came together leaves together. APIError at a failure."""
        head = self._head(self._style.chunk_object) | ({"usage": None} if include_usage else {})
        streams: dict[int, ChoiceStream] = {}
        while not generation.done:
            req, output = await generation.next()
            error = failure(req, output.end)
            if error is not None and not streams:
                raise error
            stream = streams.get(req.index) or streams.setdefault(req.index, ChoiceStream(self._style, head, req.index))
            if chunks := stream.chunks(output.text, output.end if error is None else None):
                yield chunks
            if error is not None:
                raise error
        if include_usage:
            yield encode_event(head | {"choices": [], "usage": usage(final_ends(generation))})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }


class ChoiceStream:
    """The chunks of one choice; `head` is what all chunks of the call begin with."""

    def __init__(self, style: Format, head: dict[str, Any], index: int) -> None:
        self._style = style
        self._head = head
        self._index = index
        self._opening = self._encode(style.first_choices(index))
        self._text_chunk = EventTemplate(self._chunk(style.text_choice(index, TEXT)))

    def chunks(self, text: str, end: StrEnd | None) -> bytes:
        """The chunks that bring this text, and the end where it is there; may be none."""
        opening, self._opening = self._opening, b""
        if end is not None:
            return opening + self._encode(self._style.last_choices(self._index, text, end))
        return opening + self._text_chunk.fill(text) if text else opening

    def _encode(self, choices: list[dict[str, Any]]) -> bytes:
        return b"".join([encode_event(self._chunk(choice)) for choice in choices])

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._head | {"choices": [choice]}


def final_ends(generation: Generation) -> list[StrEnd]:
    """The ends of a generation that is done."""
    return [req.end for req in generation.reqs if req.end is not None]


def _chat_delta(delta: dict[str, str]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
