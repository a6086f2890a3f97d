"""One request's text so far: decoding, stop strings and regexes, and what may be sent already.

A stop regex ends the text as a stop string does: the text stops where its match starts, and with `no_stop_trim` where
it ends. (SGLang finds the same end, and cuts the text of a regex's match only where the pattern is a literal text.)
"""

from array import array
from typing import NamedTuple

from ..common.finish_reason import FINISH_MATCHED_STR, FINISHED_MATCHED_REGEX
from ..common.incremental_decoder import make_decoder
from ..common.logprobs import LogprobBuffer, TokenLogprobs
from ..common.messages import Int32s, unpack_int32
from ..common.text_messages import StreamStart
from ..common.tokenizer import Tokenizer
from .regex_matcher import RegexMatch, make_regex_matcher
from .stop_matcher import START, StopMatch, make_matcher

TextEnd = FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX


class NewText(NamedTuple):
    """What a request has to send."""

    text: str
    token_ids: Int32s
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class DecodeStatus:
    """Takes a request's tokens one by one. Text that may be the beginning of a stop string or regex is held back.

    A method that returns a TextEnd has found the end of the text: nothing may follow it. At one token a stop string
    comes before a regex. Making one raises InvalidParam for a regex that does not compile.
    """

    def __init__(self, start: StreamStart, tokenizer: Tokenizer) -> None:
        self.start = start
        self.num_tokens = 0
        self._decoder = make_decoder(
            tokenizer,
            unpack_int32(start.context_ids),
            skip_special_tokens=start.skip_special_tokens,
            spaces_between_special_tokens=start.spaces_between_special_tokens,
        )
        self._strings = make_matcher(start.stop)
        self._string_state = START
        self._regexes = make_regex_matcher(start.stop_regex)
        self._held = ""
        self._ready: list[str] = []
        self._token_ids = array("i")
        self.logprobs = LogprobBuffer()  # of the tokens that are not taken yet, and of what comes behind the end
        self.prompt_logprobs: TokenLogprobs | None = None

    def add_token(self, token_id: int) -> TextEnd | None:
        """Take the next token; the end of the text that it brings, if any."""
        self._count_token(token_id)
        return self._add_text(self._decoder.feed(token_id))

    def add_stop_token(self, token_id: int) -> TextEnd | None:
        """Take a token that ends the request and whose text is dropped, unless that brings the end of the text."""
        self._count_token(token_id)
        if not self._stops_count or (self._strings is None and self._regexes is None):
            return None
        text = self._decoder.peek(token_id)
        if self._strings is not None:
            _, found = self._strings.feed(self._string_state, text)
            if found is not None:
                return self._end_at_string(found, text)
        match = self._regexes.peek(text) if self._regexes is not None and text else None
        return None if match is None else self._end_at_regex(match, text)

    def finish(self) -> TextEnd | None:
        """The end by token: an incomplete character and held-back text come out, unless they bring a text end."""
        end = self._add_text(self._decoder.flush())
        if end is None:
            self._ready.append(self._held)
            self._held = ""
        return end

    def take_new_text(self) -> NewText:
        """Text and token ids since the last call, held-back text excepted; log-probabilities go with their tokens."""
        logprobs, prompt_logprobs = self.logprobs.take(len(self._token_ids)), self.prompt_logprobs
        new = NewText("".join(self._ready), self._token_ids.tobytes(), logprobs, prompt_logprobs)
        self.prompt_logprobs = None
        self._ready.clear()
        self._token_ids = array("i")
        return new

    @property
    def _stops_count(self) -> bool:
        return self.num_tokens >= self.start.min_new_tokens

    def _count_token(self, token_id: int) -> None:
        self.num_tokens += 1
        self._token_ids.append(token_id)

    def _add_text(self, text: str) -> TextEnd | None:
        if self._strings is None and self._regexes is None:
            self._ready.append(text)
            return None
        if not self._stops_count:
            self._skip(text)
        elif (end := self._read(text)) is not None:
            return end
        held_len = self._strings.held_len[self._string_state] if self._strings is not None else 0
        if self._regexes is not None:
            held_len = max(held_len, self._regexes.held_len)
        text = self._held + text
        self._ready.append(text[: len(text) - held_len])
        self._held = text[len(text) - held_len :]
        return None

    def _read(self, text: str) -> TextEnd | None:
        if self._strings is not None:
            self._string_state, found = self._strings.feed(self._string_state, text)
            if found is not None:
                return self._end_at_string(found, text)
        match = self._regexes.feed(text) if self._regexes is not None else None
        return None if match is None else self._end_at_regex(match, text)

    def _skip(self, text: str) -> None:
        if self._strings is not None:
            self._string_state = self._strings.skip(self._string_state, text)
        if self._regexes is not None:
            self._regexes.skip(text)

    def _end_at_string(self, found: StopMatch, text: str) -> FINISH_MATCHED_STR:
        text = self._held + text[: found.end]
        self._end_with(text if self.start.no_stop_trim else text.removesuffix(found.stop))
        return FINISH_MATCHED_STR(found.stop)

    def _end_at_regex(self, match: RegexMatch, text: str) -> FINISHED_MATCHED_REGEX:
        text = self._held + text
        self._end_with(text[: len(text) - (match.end if self.start.no_stop_trim else match.start)])
        return FINISHED_MATCHED_REGEX(match.pattern)

    def _end_with(self, text: str) -> None:
        self._held = ""
        self._ready.append(text)
