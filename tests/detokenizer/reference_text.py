"""What a request's text must be, worked out naively from all its tokens at once. Shared by the detokenizer's tests."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import re2

from millstream.common.finish_reason import FINISH_MATCHED_STR, FINISHED_MATCHED_REGEX
from millstream.common.messages import pack_int32
from millstream.common.text_messages import StreamStart
from millstream.common.tokenizer import Tokenizer


class Ending(NamedTuple):
    """The text, what in it ended it, and how many tokens count."""

    text: str
    reason: FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX | None
    num_tokens: int


class Found(NamedTuple):
    """A stop string or regex in a text, from `start` to `end`."""

    start: int
    end: int
    reason: FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX


def start_of(
    rid: str = "r",
    *,
    stream: bool = True,
    context_ids: Sequence[int] = (),
    stop: tuple[str, ...] = (),
    stop_regex: tuple[str, ...] = (),
    min_new_tokens: int = 0,
    no_stop_trim: bool = False,
    skip_special_tokens: bool = True,
) -> StreamStart:
    """A StreamStart with defaults."""
    return StreamStart(
        rid=rid,
        frontend="http",
        stream=stream,
        prompt_len=7,
        context_ids=pack_int32(context_ids),
        min_new_tokens=min_new_tokens,
        stop=stop,
        skip_special_tokens=skip_special_tokens,
        no_stop_trim=no_stop_trim,
        stop_regex=stop_regex,
    )


def complete_text(tokenizer: Tokenizer, start: StreamStart, context: Sequence[int], ids: Sequence[int]) -> str:
    """The characters that these outputs complete: no incomplete tail."""
    return _text(tokenizer, start, context, ids, final=False)


def whole_text(tokenizer: Tokenizer, start: StreamStart, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of these outputs if nothing follows."""
    return _text(tokenizer, start, context, ids, final=True)


def expected_ending(
    tokenizer: Tokenizer, start: StreamStart, context: Sequence[int], ids: Sequence[int], *, drops_last: bool
) -> Ending:
    """The ending of a request whose token end comes after `ids`; `drops_last` for a stop token."""
    drops_last = drops_last and not start.no_stop_trim and bool(ids)
    before, base = "", 0  # the text before a token, and the end of the regex matches that were passed over
    for count in range(1, len(ids) + 1):
        now = complete_text(tokenizer, start, context, ids[:count])
        found = _first(start, now, len(before), base, counts=count >= start.min_new_tokens)
        if found is not None:
            return _cut(start, now, found, count)
        if not (drops_last and count == len(ids)):
            before = now
            base = base if count >= start.min_new_tokens else _pass_over(start, now, base)
    text = whole_text(tokenizer, start, context, ids[:-1] if drops_last else ids)
    found = _first(start, text, len(before), base, counts=len(ids) >= start.min_new_tokens)
    return Ending(text, None, len(ids)) if found is None else _cut(start, text, found, len(ids))


def _first(start: StreamStart, text: str, seen: int, base: int, *, counts: bool) -> Found | None:
    """What ends a text of which `seen` characters were there before this token: a stop string, else a regex."""
    if not counts or len(text) == seen:
        return None
    return _first_stop(text, seen, start.stop) or _first_match(text, base, start.stop_regex)


def _first_match(text: str, base: int, patterns: tuple[str, ...]) -> Found | None:
    """The match that starts first, and of those the first pattern's, in all of the text after `base`."""
    spans = []
    for index, pattern in enumerate(patterns):
        match = re2.compile(pattern).search(text, base)
        if match is not None:
            spans.append((match.start(), index, match.end()))
    if not spans:
        return None
    begin, index, end = min(spans)
    return Found(begin, end, FINISHED_MATCHED_REGEX(patterns[index]))


def _pass_over(start: StreamStart, text: str, base: int) -> int:
    """The end of the last match of a text in which matches do not count."""
    while (found := _first_match(text, base, start.stop_regex)) is not None:
        base = found.end
    return base


def _text(tokenizer: Tokenizer, start: StreamStart, context: Sequence[int], ids: Sequence[int], *, final: bool) -> str:
    if tokenizer.token_bytes is None:
        before = tokenizer.decode(context, start.skip_special_tokens)
        return tokenizer.decode([*context, *ids], start.skip_special_tokens)[len(before) :]
    before_bytes = tokenizer.decode_bytes(context, start.skip_special_tokens)
    all_bytes = tokenizer.decode_bytes([*context, *ids], start.skip_special_tokens)
    if tokenizer.token_bytes.strips_first_space and not before_bytes:
        all_bytes = all_bytes.removeprefix(b" ")
    known = codecs.getincrementaldecoder("utf-8")("replace").decode(before_bytes)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(all_bytes, final)[len(known) :]


def _first_stop(text: str, seen: int, stops: tuple[str, ...]) -> Found | None:
    """The stop string that ends first after the first `seen` characters, and of those the longest."""
    for end in range(seen + 1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return Found(end - len(stop), end, FINISH_MATCHED_STR(stop))
    return None


def _cut(start: StreamStart, text: str, found: Found, num_tokens: int) -> Ending:
    return Ending(text[: found.end if start.no_stop_trim else found.start], found.reason, num_tokens)
