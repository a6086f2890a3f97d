"""OpenAI's answers: what chat and text completions have in common, and the texts."""

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import repeat
from typing import Any

from ... import __version__
from ...common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from ...common.text_messages import StrEnd
from ...common.tokenizer import Tokenizer
from ..failure import failure
from ..req_state import Generation, ReqState
from ..sse import TEXT, EventTemplate, encode_event
from .completion_choice import CompletionChoice, Piece, join_pieces

FINGERPRINT = f"millstream-{__version__}"
ID_PREFIX = "cmpl-"


def matched_stop(end: StrEnd) -> int | str | None:
    """SGLang's `matched_stop`: the token id, string or pattern that ended the text."""
    reason = end.finish_reason
    return None if isinstance(reason, FINISH_LENGTH | FINISH_ABORT) else reason.matched


def finish_reason(end: StrEnd) -> str:
    """OpenAI's word for how a text ended."""
    if isinstance(end.finish_reason, FINISH_LENGTH):
        return "length"
    return "abort" if isinstance(end.finish_reason, FINISH_ABORT) else "stop"


def usage(reqs: Iterable[ReqState], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Tokens of all choices together; a prompt with several answers counts once."""
    ended = [(req, req.end) for req in reqs if req.end is not None]
    prompts = [end.stats for req, end in ended if req.counts_prompt]
    prompt_tokens = sum(stats.prompt_tokens for stats in prompts)
    completion_tokens = sum(end.completion_tokens for _, end in ended)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in prompts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def usage_so_far(reqs: Iterable[ReqState]) -> dict[str, int]:
    """The same while they run, as far as it is known."""
    counted = [(req.prompt_len if req.counts_prompt else 0, req.num_outputs) for req in reqs]
    prompt_tokens, completion_tokens = (sum(column) for column in zip(*counted, strict=True))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class CompletionResponse:
    """POST /v1/completions: texts, the last of each choice with its finish reason.

    The id and the time of creation are the same in all chunks of a call.
    """

    def __init__(
        self,
        generation: Generation,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        echoes: Sequence[str | None] = (),
    ) -> None:
        """`echoes[i]` is the prompt's text where choice i begins with it; all of them or none."""
        self._generation = generation
        self._choices = [
            CompletionChoice(req, tokenizer, echo)
            for req, echo in zip(generation.reqs, echoes or repeat(None), strict=False)
        ]
        self._head = {
            "id": ID_PREFIX + request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for every end; APIError if one of them is a failure."""
        generation = self._generation
        pieces: list[list[Piece]] = [[] for _ in generation.reqs]
        while not generation.done:
            req, output = await generation.next()
            error = failure(req, output.end)
            if error is not None:
                raise error
            pieces[req.index].append(await self._choices[req.index].read(output))
        ends = final_ends(generation)
        choices = [completion_choice(index, join_pieces(pieces[index]), end) for index, end in enumerate(ends)]
        return self._head | {"choices": choices, "usage": usage(generation.reqs)}

    async def events(self, *, include_usage: bool, continuous_usage: bool = False) -> AsyncGenerator[bytes, None]:
        """Encoded chunks as outputs come; all that came together leaves together. APIError at a failure.

        The last one has the usage with `include_usage`, the others that of all so far with `continuous_usage`.
        """
        generation = self._generation
        head = self._head | ({"usage": None} if include_usage else {})
        templates: dict[int, EventTemplate] = {}
        while not generation.done:
            req, output = await generation.next()
            index, error = req.index, failure(req, output.end)
            if error is not None and not (templates and output.text):
                raise error
            if continuous_usage:
                templates.pop(index, None)
                head["usage"] = usage_so_far(generation.reqs)
            template = templates.get(index) or templates.setdefault(index, _template(head, index))
            piece = await self._choices[index].read(output)
            if piece.logprobs is not None or (output.end is not None and error is None):
                end = output.end if error is None else None
                yield encode_event(head | {"choices": [completion_choice(index, piece, end)]})
            elif piece.text:
                yield template.fill(piece.text)
            if error is not None:
                raise error
        if include_usage:
            yield encode_event(head | {"choices": [], "usage": usage(generation.reqs)})


def completion_choice(index: int, piece: Piece, end: StrEnd | None) -> dict[str, Any]:
    """A choice with a piece of it, and with its end where that is there."""
    choice = {"index": index, "text": piece.text, "logprobs": piece.logprobs, "finish_reason": None}
    return choice if end is None else choice | {"finish_reason": finish_reason(end), "matched_stop": matched_stop(end)}


def final_ends(generation: Generation) -> list[StrEnd]:
    """The ends of a generation that is done."""
    return [req.end for req in generation.reqs if req.end is not None]


def _template(head: dict[str, Any], index: int) -> EventTemplate:
    return EventTemplate(head | {"choices": [completion_choice(index, Piece(TEXT, None), None)]})
