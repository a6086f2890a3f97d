"""The answer to a turn of a chat while it comes: deltas of each choice, and how it ended."""

import asyncio
from collections.abc import Iterable, Sequence

from ...common.incremental_decoder import make_decoder
from ...common.logprobs import TokenLogprobs
from ...common.messages import unpack_int32
from ...common.sampling_params import SamplingParams
from ...common.text_messages import NUM_CONTEXT_TOKENS, StrEnd
from ...common.tokenizer import Tokenizer
from ..api.logprob_format import MANY_LOGPROBS, chat_entries
from ..api.openai_format import finish_reason
from ..api_error import APIError
from ..failure import failure
from ..req_state import Generation, Output, ReqState
from .delta import Delta, OutputParser, PlainParser
from .delta_logprobs import DeltaLogprobs

INLINE_CHARS = 10_000  # parsed in some milliseconds; more of them in a thread
UTF8_CONTINUATIONS = bytes(range(0x80, 0xC0))  # all bytes of a character but its first


class ChatGeneration:
    """One waiter calls `next` until `done`. `parsers` has one for each choice; the params are those of all."""

    def __init__(
        self,
        generation: Generation,
        parsers: Sequence[OutputParser],
        tokenizer: Tokenizer,
        sampling_params: SamplingParams,
    ) -> None:
        self._generation = generation
        self._parsers = parsers
        self._tokenizer = tokenizer
        self._token_ids = [b"" if isinstance(parser, PlainParser) else bytearray() for parser in parsers]
        self._logprobs = [
            _delta_logprobs(req, tokenizer, sampling_params) if req.wanted_logprobs is not None else None
            for req in generation.reqs
        ]
        self._called_tools: set[int] = set()
        self._is_open = False
        self._failure: APIError | None = None

    @property
    def done(self) -> bool:
        """Whether every choice has ended and has been taken."""
        return self._generation.done and self._failure is None

    @property
    def num_choices(self) -> int:
        """How many answers are asked for."""
        return len(self._generation.reqs)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self._generation.reqs[0].prompt_len

    @property
    def reqs(self) -> list[ReqState]:
        """What waits for each choice."""
        return self._generation.reqs

    @property
    def ends(self) -> list[StrEnd]:
        """The ends of the choices that have ended, in order."""
        return [req.end for req in self._generation.reqs if req.end is not None]

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens of the choices that have ended were reasoning, tags included."""
        found = zip(self._parsers, self._token_ids, strict=True)
        return sum(
            count_tokens(self._tokenizer, unpack_int32(bytes(ids)), parser.reasoning_spans) for parser, ids in found
        )

    def finish_reason(self, index: int, end: StrEnd) -> str:
        """In OpenAI's words: stop, length, tool_calls or abort."""
        reason = finish_reason(end)
        return "tool_calls" if reason == "stop" and index in self._called_tools else reason

    async def next(self) -> tuple[int, list[Delta], StrEnd | None]:
        """Wait for news of any choice: its index, what came (maybe nothing), and its end where that is there.

        APIError for a request that failed, after what came ahead of the failure has been handed out.
        """
        if self._failure is not None:
            raise self._failure
        req, output = await self._generation.next()
        self._failure = failure(req, output.end)
        if self._failure is not None and not self._is_open:
            raise self._failure
        self._is_open = True
        parser, token_ids = self._parsers[req.index], self._token_ids[req.index]
        if isinstance(token_ids, bytearray):
            token_ids += output.token_ids
        is_long = len(output.text) > INLINE_CHARS
        deltas = await asyncio.to_thread(_parse, parser, output) if is_long else _parse(parser, output)
        if any(delta.tool_calls for delta in deltas):
            self._called_tools.add(req.index)
        if (places := self._logprobs[req.index]) is not None:
            if output.logprobs is not None:
                columns = (places, self._tokenizer, unpack_int32(output.token_ids), output.logprobs)
                is_long = output.logprobs.num_logprobs > MANY_LOGPROBS
                await asyncio.to_thread(_add, *columns) if is_long else _add(*columns)
            deltas = places.place(deltas, is_last=output.end is not None)
        return req.index, deltas, output.end if self._failure is None else None


def _parse(parser: OutputParser, output: Output) -> list[Delta]:
    deltas = parser.feed(output.text)
    return deltas + parser.finish() if output.end is not None else deltas


def _delta_logprobs(req: ReqState, tokenizer: Tokenizer, params: SamplingParams) -> DeltaLogprobs:
    """With the decoder that the detokenizer has for the same request."""
    decoder = make_decoder(
        tokenizer,
        req.prompt_ids[-NUM_CONTEXT_TOKENS:],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return DeltaLogprobs(decoder)


def _add(places: DeltaLogprobs, tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: TokenLogprobs) -> None:
    places.add(token_ids, chat_entries(tokenizer, token_ids, logprobs))


def count_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> int:
    """How many of the tokens begin in one of the spans of characters of their text; the spans are in order."""
    num_tokens = position = start = end = 0
    left = iter(spans)
    for token_id in token_ids:
        while position >= end:
            span = next(left, None)
            if span is None:
                return num_tokens
            start, end = span
        num_tokens += position >= start
        position += len(tokenizer.bytes_of(token_id).translate(None, UTF8_CONTINUATIONS))
    return num_tokens
