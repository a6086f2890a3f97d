"""OpenAI's answers: chunks of streams, whole responses, usage."""

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Protocol

from .. import __version__
from ..common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from ..common.messages import StrEnd
from .accounting import error_code
from .api_error import APIError
from .req_state import CLIENT_ABORT, Generation, Output, ReqState

FINGERPRINT = f"millstream-{__version__}"


class Format(Protocol):
    """How one of the two routes writes its choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def chunk_choices(self, req: ReqState, output: Output, *, is_first: bool) -> list[dict[str, Any]]:
        """The choices, one a chunk, that bring an output."""

    def choice(self, index: int, text: str, end: StrEnd) -> dict[str, Any]:
        """The choice of a whole response."""


class ChatFormat:
    """POST /v1/chat/completions: a role chunk, deltas, a finish chunk."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def chunk_choices(self, req: ReqState, output: Output, *, is_first: bool) -> list[dict[str, Any]]:
        """See Format."""
        choices = []
        if is_first:
            choices.append(_chat_delta({"role": "assistant", "content": ""}))
        if output.text:
            choices.append(_chat_delta({"content": output.text}))
        if output.end is not None:
            choices.append(_chat_delta({}) | finish_fields(output.end))
        return choices

    def choice(self, index: int, text: str, end: StrEnd) -> dict[str, Any]:
        """See Format."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None} | finish_fields(end)


class CompletionFormat:
    """POST /v1/completions: texts, the last of each choice with its finish reason."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def chunk_choices(self, req: ReqState, output: Output, *, is_first: bool) -> list[dict[str, Any]]:
        """See Format."""
        if output.end is not None:
            return [self.choice(req.index, output.text, output.end)]
        choice = {"index": req.index, "text": output.text, "logprobs": None, "finish_reason": None}
        return [choice] if output.text else []

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

    async def events(self, generation: Generation, *, include_usage: bool) -> AsyncGenerator[list[Any], None]:
        """Chunks as outputs come; all that came together leaves together. APIError at a failure."""
        head = self._head(self._style.chunk_object) | ({"usage": None} if include_usage else {})
        started: set[int] = set()
        while not generation.done:
            req, output = await generation.next()
            error = failure(req, output.end)
            if error is not None and not started:
                raise error
            shown = output if error is None else Output(output.text, output.token_ids, None)
            choices = self._style.chunk_choices(req, shown, is_first=req.index not in started)
            started.add(req.index)
            if choices:
                yield [head | {"choices": [choice]} for choice in choices]
            if error is not None:
                raise error
        if include_usage:
            yield [head | {"choices": [], "usage": usage(final_ends(generation))}]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }


def final_ends(generation: Generation) -> list[StrEnd]:
    """The ends of a generation that is done."""
    return [req.end for req in generation.reqs if req.end is not None]


def _chat_delta(delta: dict[str, str]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
