"""One request's text so far: decoding, stop strings, and what may be sent already."""

from array import array
from typing import NamedTuple

from ..common.messages import Int32s, StreamStart, unpack_int32
from ..common.tokenizer import Tokenizer
from .incremental_decoder import make_decoder
from .stop_matcher import START, StopMatch, make_matcher


class NewText(NamedTuple):
    """What a request has to send."""

    text: str
    token_ids: Int32s


class DecodeStatus:
    """Takes a request's tokens one by one. Text that may be the beginning of a stop string is held back.

    A method that returns a stop string has found the end of the text: nothing may follow it.
    """

    def __init__(self, start: StreamStart, tokenizer: Tokenizer) -> None:
        self.start = start
        self.num_tokens = 0
        self._decoder = make_decoder(tokenizer, unpack_int32(start.context_ids), start.skip_special_tokens)
        self._matcher = make_matcher(start.stop)
        self._match_state = START
        self._held = ""
        self._ready: list[str] = []
        self._token_ids = array("i")

    def add_token(self, token_id: int) -> str | None:
        """Take the next token; the stop string that it completes, if any."""
        self._count_token(token_id)
        return self._add_text(self._decoder.feed(token_id))

    def add_stop_token(self, token_id: int) -> str | None:
        """Take a token that ends the request and whose text is dropped, unless it completes a stop string."""
        self._count_token(token_id)
        if self._matcher is None or not self._stops_count:
            return None
        _, found = self._matcher.feed(self._match_state, text := self._decoder.peek(token_id))
        return None if found is None else self._end_at(found, text)

    def finish(self) -> str | None:
        """The end by token: an incomplete character and held-back text come out, unless they make a stop string."""
        stop = self._add_text(self._decoder.flush())
        if stop is None:
            self._ready.append(self._held)
            self._held = ""
        return stop

    def take_new_text(self) -> NewText:
        """Text and token ids since the last call, held-back text excepted."""
        new = NewText("".join(self._ready), self._token_ids.tobytes())
        self._ready.clear()
        self._token_ids = array("i")
        return new

    @property
    def _stops_count(self) -> bool:
        return self.num_tokens >= self.start.min_new_tokens

    def _count_token(self, token_id: int) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)

    def _add_text(self, text: str) -> str | None:
        if self._matcher is None:
            self._ready.append(text)
            return None
        if self._stops_count:
            self._match_state, found = self._matcher.feed(self._match_state, text)
            if found is not None:
                return self._end_at(found, text)
        else:
            self._match_state = self._matcher.skip(self._match_state, text)
        text = self._held + text
        sendable = len(text) - self._matcher.held_len[self._match_state]
        self._ready.append(text[:sendable])
        self._held = text[sendable:]
        return None

    def _end_at(self, found: StopMatch, text: str) -> str:
        text = self._held + text[: found.end]
        self._held = ""
        self._ready.append(text if self.start.no_stop_trim else text.removesuffix(found.stop))
        return found.stop
