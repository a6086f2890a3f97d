"""From the tokens of a step to the text of a step, and the one final answer of every request.

Token ends are the scheduler's proposal and arrive with the tokens. A stop string or regex at an earlier or the same
token comes first: then the answer says so, the scheduler gets a TextEnded, and whatever it still sends of the request is
ignored. So a token that was sampled after the end shows nowhere: not in text, token ids or counts.

Whatever a request brings that can't be handled ends that request alone, as a text end does: with a 500.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ..common.finish_reason import FINISH_ABORT, FINISH_MATCHED_TOKEN
from ..common.messages import unpack_int32
from ..common.sampling_params import InvalidParam
from ..common.text_messages import (
    BatchTokenIDOutput,
    RequestEnd,
    RequestStats,
    StreamStart,
    StrEnd,
    StrOutput,
    TextEnded,
)
from ..common.tokenizer import Tokenizer
from .decode_status import DecodeStatus, TextEnd

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


class DetokenizerOutput(NamedTuple):
    """What one message leads to."""

    outputs: list[StrOutput]
    text_ends: list[TextEnded]


class RowTokens(NamedTuple):
    """One request's part of a BatchTokenIDOutput."""

    rid: str
    generation: int
    cached_tokens: int
    token_ids: list[int]
    embedding: bytes = b""


class Detokenizer:
    """Holds the text of every open request; a request that is not open has ended, and its tokens are ignored."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: dict[str, DecodeStatus] = {}

    @property
    def num_open(self) -> int:
        """Requests that have started and not ended."""
        return len(self._open)

    def handle(self, message: BatchTokenIDOutput) -> DetokenizerOutput:
        """Read starts, tokens, ends, in this order; outputs follow the order of the message."""
        done = DetokenizerOutput([], [])
        for start in message.starts:
            self._start(start, done)
        self._take_logprobs(message)
        ends = {end.rid: end for end in message.ends}
        for row in split_rows(message):
            if row.rid in self._open:
                self._take_row(row, ends.get(row.rid), done)
        for rid, end in ends.items():
            if rid in self._open:  # it ends without a token in this message
                embedding = message.embeddings.get(rid, b"")
                stats = end.stats
                self._take_row(RowTokens(rid, stats.num_retractions, stats.cached_tokens, [], embedding), end, done)
        return done

    def _start(self, start: StreamStart, done: DetokenizerOutput) -> None:
        """Open a request; one that can't be opened, as its stop regexes do not compile, is answered at once."""
        made = make_or_abort(start.rid, lambda: DecodeStatus(start, self._tokenizer))
        if isinstance(made, DecodeStatus):
            self._open[start.rid] = made
            return
        answer = StrEnd(made, 0, RequestStats(start.prompt_len, 0, 0))
        done.outputs.append(StrOutput(start.rid, "", b"", answer))
        done.text_ends.append(TextEnded(start.rid, 0, 0))

    def _take_logprobs(self, message: BatchTokenIDOutput) -> None:
        """They wait for the tokens that they belong to."""
        for rid, logprobs in message.logprobs.items():
            if rid in self._open:
                self._open[rid].logprobs.add(logprobs)
        for rid, logprobs in message.prompt_logprobs.items():
            if rid in self._open:
                self._open[rid].prompt_logprobs = logprobs

    def _take_row(self, row: RowTokens, end: RequestEnd | None, done: DetokenizerOutput) -> None:
        status = self._open[row.rid]
        text_end = make_or_abort(row.rid, lambda: add_tokens(status, row.token_ids, end))
        answer = None
        if text_end is not None:
            answer = StrEnd(text_end, status.num_tokens, stats_of(status, row, end))
            done.text_ends.append(TextEnded(row.rid, row.generation, status.num_tokens))
        elif end is not None:
            answer = StrEnd(end.finish_reason, status.num_tokens, end.stats)
        if answer is not None:
            del self._open[row.rid]
            logger.debug("request %s: ends after %d tokens: %s", row.rid, status.num_tokens, answer.finish_reason)
        if answer is not None or status.start.stream:
            new = status.take_new_text()
            done.outputs.append(
                StrOutput(row.rid, new.text, new.token_ids, answer, new.logprobs, new.prompt_logprobs, row.embedding)
            )


def make_or_abort(rid: str, make: Callable[[], Made]) -> Made | FINISH_ABORT:
    """What `make` makes for a request, or the end of the request: whatever goes wrong in it must not reach another."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizer's panics are no Exception
        logger.exception("request %s: its text cannot be made; it ends", rid)
        why = str(error) if isinstance(error, InvalidParam) else "The text of the request could not be made."
        return FINISH_ABORT(why, 500, "InternalServerError")


def split_rows(message: BatchTokenIDOutput) -> list[RowTokens]:
    """The columns of a message as rows."""
    token_ids = unpack_int32(message.token_ids)
    columns = (message.generations, message.cached_tokens, message.num_tokens)
    rows, start = [], 0
    for rid, generation, cached, count in zip(message.rids, *map(unpack_int32, columns), strict=True):
        rows.append(RowTokens(rid, generation, cached, token_ids[start : start + count]))
        start += count
    return rows


def add_tokens(status: DecodeStatus, token_ids: Sequence[int], end: RequestEnd | None) -> TextEnd | None:
    """Give a request its new tokens and its token end; the text end that comes first, if any."""
    drops_last = end is not None and isinstance(end.finish_reason, FINISH_MATCHED_TOKEN)
    last = len(token_ids) - 1 if drops_last and not status.start.no_stop_trim else None
    for position, token_id in enumerate(token_ids):
        text_end = status.add_stop_token(token_id) if position == last else status.add_token(token_id)
        if text_end is not None:
            return text_end
    return None if end is None else status.finish()


def stats_of(status: DecodeStatus, row: RowTokens, end: RequestEnd | None) -> RequestStats:
    """The scheduler's figures where its end is there already, else what its tokens say."""
    return RequestStats(status.start.prompt_len, row.cached_tokens, row.generation) if end is None else end.stats
