"""What a request's text must be, worked out naively from all its tokens at once. Shared by the detokenizer's tests."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from millstream.common.messages import StreamStart, pack_int32
from millstream.common.tokenizer import Tokenizer


class Ending(NamedTuple):
    """The text, the stop string that ended it, and how many tokens count."""

    text: str
    stop: str | None
    num_tokens: int


def start_of(
    rid: str = "r",
    *,
    stream: bool = True,
    context_ids: Sequence[int] = (),
    stop: tuple[str, ...] = (),
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
    before = ""
    for count in range(1, len(ids) + 1):
        now = complete_text(tokenizer, start, context, ids[:count])
        found = _first_stop(now, len(before), start.stop) if count >= start.min_new_tokens else None
        if found is not None:
            return _cut(start, now, found, count)
        if not (drops_last and count == len(ids)):
            before = now
    kept = ids[:-1] if drops_last else ids
    text = whole_text(tokenizer, start, context, kept)
    found = _first_stop(text, len(before), start.stop) if len(ids) >= start.min_new_tokens else None
    return Ending(text, None, len(ids)) if found is None else _cut(start, text, found, len(ids))


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


def _first_stop(text: str, seen: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(end, stop string): the one that ends first after the first `seen` characters, and of those the longest."""
    for end in range(seen + 1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return end, max(matching, key=len)
    return None


def _cut(start: StreamStart, text: str, found: tuple[int, str], num_tokens: int) -> Ending:
    end, stop = found
    return Ending(text[: end if start.no_stop_trim else end - len(stop)], stop, num_tokens)
