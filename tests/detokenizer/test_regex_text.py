"""Stop regexes over token streams: the end, the text and what is held are those of a search in all of the text."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millstream.common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_TOKEN
from millstream.common.sampling_params import InvalidParam
from millstream.common.stop_regex import compile_stop_regexes
from millstream.common.text_messages import StreamStart
from tests.detokenizer.reference_text import expected_ending, start_of, whole_text
from tests.detokenizer.test_text_properties import BYTES_JOIN, check_ending, cut, run, single_bytes, stop_strings
from tests.text.sample_tokenizers import TEXTS

CHARACTERS = ["a", "b", "e", " ", r"\n", ".", "\u00e9", r"\w", r"\d", r"\s", "[ab]", "[^a]", r"\W", "(?i:A)", "(?s:.)"]
ASSERTIONS = ["^", "$", r"\b", r"\B", r"\A", r"\z", "(?m:^)", "(?m:$)"]
REPEATS = ["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}", "{0,2}"]


def patterns() -> st.SearchStrategy[str]:
    """Regexes of every construct, mostly small, that match text of TEXTS now and then."""
    simple = st.one_of(st.sampled_from(CHARACTERS), st.sampled_from(CHARACTERS), st.sampled_from(ASSERTIONS))
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
            st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
            st.tuples(inner, st.sampled_from(REPEATS)).map("(?:{0[0]}){0[1]}".format),
            inner.map("(?i)".__add__),
        ),
        max_leaves=6,
    )


def can_be_served(stop_regex: tuple[str, ...]) -> bool:
    try:
        compile_stop_regexes(stop_regex)
    except InvalidParam:
        return False
    return True


@st.composite
def stop_regexes(draw: st.DrawFn) -> tuple[str, ...]:
    found = tuple(draw(st.lists(patterns(), min_size=1, max_size=3)))
    assume(can_be_served(found))
    return found


def ids_of_text(draw: st.DrawFn, name: str) -> list[int]:
    """Real text in real tokens, or the same and other text in tokens of one byte, broken characters among them."""
    tokenizer = BYTES_JOIN[name]
    if draw(st.booleans()):
        return tokenizer.encode(draw(st.sampled_from(TEXTS)), add_special_tokens=False)[:30] or [0]
    letters = [
        i for i in single_bytes(tokenizer) if (tokenizer.token_bytes or [])[i] in {b"a", b"b", b" ", b"\n", b"1"}
    ]
    return draw(st.lists(st.sampled_from([*letters * 3, *single_bytes(tokenizer)[-9:]]), min_size=1, max_size=24))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["smollm2", "llama"])
def test_stop_regexes_end_the_text_where_a_search_of_the_whole_text_says(name: str, data: st.DataObject) -> None:
    tokenizer = BYTES_JOIN[name]
    ids = ids_of_text(data.draw, name)
    text = whole_text(tokenizer, start_of(), [], ids)
    start = start_of(
        stop=data.draw(st.one_of(st.just(()), st.just(()), stop_strings(text))),
        stop_regex=data.draw(stop_regexes()),
        min_new_tokens=data.draw(st.sampled_from([0, 0, 2, 4])),
        no_stop_trim=data.draw(st.booleans()),
    )
    drops_last = data.draw(st.booleans())
    check_all_ways(name, start, ids, cut(data.draw, ids), drops_last=drops_last)


def check_all_ways(
    name: str, start: StreamStart, ids: list[int], steps: Sequence[Sequence[int]], *, drops_last: bool
) -> None:
    """The same end, with the same text, token by token, in other steps, streamed and whole."""
    tokenizer = BYTES_JOIN[name]
    reason = FINISH_MATCHED_TOKEN(ids[-1]) if drops_last else FINISH_LENGTH(len(ids))
    expected = expected_ending(tokenizer, start, [], ids, drops_last=drops_last)
    for stream in (True, False):
        for way in ([[token_id] for token_id in ids], steps):
            asked = start_of(
                stream=stream,
                stop=start.stop,
                stop_regex=start.stop_regex,
                min_new_tokens=start.min_new_tokens,
                no_stop_trim=start.no_stop_trim,
            )
            check_ending(run(tokenizer, asked, way, reason), asked, ids, reason, expected)
