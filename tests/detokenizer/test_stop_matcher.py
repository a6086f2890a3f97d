"""Stop strings: which one, where, and how much is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.common.sampling_params import MAX_STOP_LEN, InvalidParam, SamplingParams, check_sampling_params
from millstream.detokenizer.stop_matcher import START, StopMatch, StopMatcher, make_matcher

ALPHABET = "ab\u00e9"


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5).map(tuple),
    text=st.text(ALPHABET, max_size=30),
)
def test_a_state_holds_back_the_longest_beginning_of_a_stop_string_and_no_more(
    stops: tuple[str, ...], text: str
) -> None:
    matcher, state = StopMatcher(stops), START
    for end in range(1, len(text) + 1):
        state = matcher.skip(state, text[end - 1])
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(b) for b in beginnings if text[:end].endswith(b)), default=0)
        assert matcher.held_len[state] == held


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=5).map(tuple),
    pieces=st.lists(st.text(ALPHABET, max_size=8), max_size=8),
)
def test_the_first_end_wins_and_of_those_the_longest_however_the_text_is_cut(
    stops: tuple[str, ...], pieces: list[str]
) -> None:
    matcher, state, seen = StopMatcher(stops), START, 0
    found = None
    for piece in pieces:
        state, match = matcher.feed(state, piece)
        if match is not None:
            found = (match.stop, seen + match.end)
            break
        seen += len(piece)
    text = "".join(pieces)
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    assert found == ((min(ends)[2], min(ends)[0]) if ends else None)


def test_requests_with_the_same_stop_strings_share_one_automaton() -> None:
    assert make_matcher(("a", "b")) is make_matcher(("a", "b"))
    assert make_matcher(()) is None


def test_stop_strings_that_would_cost_too_much_are_refused() -> None:
    check_sampling_params(SamplingParams(stop=("x" * MAX_STOP_LEN,)), 10)
    with pytest.raises(InvalidParam, match="at most 256 characters"):
        check_sampling_params(SamplingParams(stop=("a", "x" * (MAX_STOP_LEN + 1))), 10)


def test_a_stop_string_is_found_across_pieces() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    state, match = matcher.feed(START, "Hello\n")
    assert (match, matcher.held_len[state]) == (None, 1)
    state, match = matcher.feed(state, "\nUs")
    assert (match, matcher.held_len[state]) == (None, 4)
    _, match = matcher.feed(state, "er: more")
    assert match == StopMatch("\n\nUser:", 3)
