"""One choice of a text completion while it comes: its text, and the log-probabilities of its tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...common.messages import unpack_int32
from ...common.tokenizer import Tokenizer
from ..req_state import Output, ReqState
from .logprob_format import MANY_LOGPROBS, CompletionLogprobs


class Piece(NamedTuple):
    """What an output brings to the client."""

    text: str
    logprobs: dict[str, Any] | None


class CompletionChoice:
    """Takes the outputs of one request in order. The first brings `echo`, the prompt's text, if the client wants it."""

    def __init__(self, req: ReqState, tokenizer: Tokenizer, echo: str | None) -> None:
        self._prompt_ids = req.prompt_ids
        self._echo = echo
        self._logprobs = None if req.wanted_logprobs is None else CompletionLogprobs(tokenizer, req.hidden_ids)

    async def read(self, output: Output) -> Piece:
        """The next piece."""
        echo, self._echo = self._echo, None
        text = (echo or "") + output.text
        if self._logprobs is None:
            return Piece(text, None)
        if output.num_logprobs > MANY_LOGPROBS:
            return Piece(text, await asyncio.to_thread(self._write, self._logprobs, output, echo))
        return Piece(text, self._write(self._logprobs, output, echo))

    def _write(self, writer: CompletionLogprobs, output: Output, echo: str | None) -> dict[str, Any]:
        prompt = [] if echo is None else [writer.prompt(self._prompt_ids, output.prompt_logprobs, echo)]
        return _join([*prompt, writer.outputs(unpack_int32(output.token_ids), output.logprobs)])


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces as one."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Piece("".join(piece.text for piece in pieces), _join(logprobs) if logprobs else None)


def _join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}
