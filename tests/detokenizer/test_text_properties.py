"""Any ids, any split into steps, any stop strings: the text is that of all tokens decoded at once."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_TOKEN, FinishReason
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.text_messages import (
    BatchTokenIDOutput,
    RequestEnd,
    RequestStats,
    StreamStart,
    StrOutput,
    TextEnded,
)
from millstream.common.tokenizer import Tokenizer
from millstream.detokenizer.detokenizer import Detokenizer
from tests.detokenizer.reference_text import Ending, complete_text, expected_ending, start_of, whole_text
from tests.text.sample_tokenizers import (
    TEXTS,
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    smollm2,
    tokenizer_of,
)

STATS = RequestStats(7, 4, 1)
BYTES_JOIN = {
    "smollm2": smollm2(),
    "byte level": tokenizer_of(byte_level_backend()),
    "llama": tokenizer_of(sentencepiece_backend(strips=True)),
    "gemma": tokenizer_of(sentencepiece_backend(strips=False)),
}
TOKENIZERS = {**BYTES_JOIN, "metaspace": tokenizer_of(metaspace_backend())}


class Run(NamedTuple):
    """What came out of a detokenizer for one request."""

    outputs: list[StrOutput]
    text_ends: list[TextEnded]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in unpack_int32(output.token_ids)]


def run(tokenizer: Tokenizer, start: StreamStart, steps: Sequence[Sequence[int]], reason: FinishReason) -> Run:
    """Feed the steps; the last one brings the token end."""
    detokenizer, found = Detokenizer(tokenizer), Run([], [])
    num_tokens = sum(map(len, steps))
    for index, ids in enumerate(steps):
        ends = [RequestEnd(start.rid, reason, num_tokens, STATS)] if index == len(steps) - 1 else []
        outputs, text_ends = detokenizer.handle(
            BatchTokenIDOutput(
                starts=[start] if index == 0 else [],
                rids=[start.rid],
                generations=pack_int32([1]),
                cached_tokens=pack_int32([4]),
                num_tokens=pack_int32([len(ids)]),
                token_ids=pack_int32(ids),
                ends=ends,
            )
        )
        found.outputs.extend(outputs)
        found.text_ends.extend(text_ends)
    assert detokenizer.num_open == 0
    return found


@cache
def single_bytes(tokenizer: Tokenizer) -> list[int]:
    """The ids of tokens that are one byte."""
    tokens = tokenizer.token_bytes
    return [i for i in range(tokenizer.vocab_size) if tokens is not None and len(tokens[i]) == 1] or [0]


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of all kinds, one after another: any, byte pieces, special ones, ids of real text, unknown ones."""
    byte_pieces = single_bytes(tokenizer)
    kinds = (
        st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i]),
        st.lists(st.sampled_from(byte_pieces), min_size=1, max_size=6),
        st.sampled_from(sorted(tokenizer.special_token_ids)).map(lambda i: [i]),
        st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text, add_special_tokens=False)[:12]),
        st.just([tokenizer.vocab_size + 5]),
    )
    runs = draw(st.lists(st.one_of(*kinds), min_size=1, max_size=8))
    return [token_id for ids in runs for token_id in ids][:40] or [0]


def cut(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    """Cut ids into steps of one or more."""
    places = sorted(draw(st.sets(st.integers(1, max(1, len(ids) - 1)), max_size=len(ids))))
    steps = [ids[start:end] for start, end in zip([0, *places], [*places, len(ids)], strict=True)]
    return [step for step in steps if step]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_pieces_are_the_decode_of_all_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    context = data.draw(st.one_of(st.just([]), token_ids(tokenizer)))[:5]
    start = start_of(context_ids=context, skip_special_tokens=data.draw(st.booleans()))
    steps = cut(data.draw, ids)
    found = run(tokenizer, start, steps, FINISH_LENGTH(len(ids)))
    expected = whole_text(tokenizer, start, context, ids)
    assert found.text == expected
    assert found.token_ids == ids
    assert [output.end is not None for output in found.outputs] == [False] * (len(steps) - 1) + [True]
    if not context:
        assert found.text == tokenizer.decode(ids, start.skip_special_tokens)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", BYTES_JOIN)
def test_no_piece_runs_ahead_of_the_characters_that_are_complete(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    start = start_of(skip_special_tokens=data.draw(st.booleans()))
    found = run(tokenizer, start, [[token_id] for token_id in ids], FINISH_LENGTH(len(ids)))
    text = ""
    for count, output in enumerate(found.outputs[:-1], 1):
        text += output.text
        assert text == complete_text(tokenizer, start, [], ids[:count])


@settings(max_examples=50, deadline=None)
@given(text=st.text(min_size=1, max_size=30))
@pytest.mark.parametrize("name", BYTES_JOIN)
def test_a_stream_of_real_text_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    start = start_of(skip_special_tokens=False)
    if not ids or "\ufffd" in tokenizer.decode(ids, skip_special_tokens=False):
        return
    found = run(tokenizer, start, [[token_id] for token_id in ids], FINISH_LENGTH(len(ids)))
    assert not [output.text for output in found.outputs if "\ufffd" in output.text]


@settings(max_examples=250, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", BYTES_JOIN)
def test_stop_strings_end_the_text_where_the_whole_text_says(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(token_ids(tokenizer))
    context = data.draw(st.one_of(st.just([]), token_ids(tokenizer)))[:5]
    plain = start_of(context_ids=context, skip_special_tokens=data.draw(st.booleans()))
    text = whole_text(tokenizer, plain, context, ids)
    start = start_of(
        stream=data.draw(st.booleans()),
        context_ids=context,
        skip_special_tokens=plain.skip_special_tokens,
        stop=data.draw(stop_strings(text)),
        min_new_tokens=data.draw(st.integers(0, 4)),
        no_stop_trim=data.draw(st.booleans()),
    )
    drops_last = data.draw(st.booleans())
    reason = FINISH_MATCHED_TOKEN(ids[-1]) if drops_last else FINISH_LENGTH(len(ids))
    found = run(tokenizer, start, cut(data.draw, ids), reason)
    check_ending(found, start, ids, reason, expected_ending(tokenizer, start, context, ids, drops_last=drops_last))


def check_ending(found: Run, start: StreamStart, ids: list[int], reason: FinishReason, expected: Ending) -> None:
    text, text_end, num_tokens = expected
    end = found.outputs[-1].end
    assert end is not None
    assert found.text == text
    assert found.token_ids == ids[:num_tokens]
    assert end.completion_tokens == num_tokens
    assert end.finish_reason == (text_end or reason)
    assert found.text_ends == ([] if text_end is None else [TextEnded(start.rid, 1, num_tokens)])
    assert sum(output.end is not None for output in found.outputs) == 1
    assert start.stream or len(found.outputs) == 1


def stop_strings(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """One to four stop strings: pieces of the text, and some that do not come."""
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    pieces = places.map(lambda place: text[place[0] : place[0] + place[1]] or "z")
    return st.lists(st.one_of(pieces, st.text("ab e", min_size=1, max_size=4)), min_size=1, max_size=4).map(tuple)
