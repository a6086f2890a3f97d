"""Stop regexes over pieces of text: what is found, what is held, what a long output costs."""

import time
from statistics import median

import pytest
import re2

from millstream.common.stop_regex import MAX_HELD_BYTES, StopRegexes, compile_stop_regexes
from millstream.detokenizer.regex_matcher import BrokenRegex, RegexMatch, RegexMatcher, make_regex_matcher

ENGLISH = "the quick brown fox jumps over the lazy dog, "


def matcher_of(*patterns: str) -> RegexMatcher:
    return RegexMatcher(compile_stop_regexes(patterns))


def read(matcher: RegexMatcher, *pieces: str) -> tuple[RegexMatch | None, str]:
    """Feed pieces up to a match; the match, and the text that is held or was matched."""
    text = ""
    for piece in pieces:
        text += piece
        match = matcher.feed(piece)
        if match is not None:
            return match, text[len(text) - match.start : len(text) - match.end]
    return None, text[len(text) - matcher.held_len :]


@pytest.mark.parametrize(
    ("pattern", "pieces", "matched", "text"),
    [
        (r"\bcat", ("con", "cat"), False, ""),
        (r"\bcat", ("con ", "c", "at"), True, "cat"),
        (r"x\bcat|cat!", ("x", "c", "at"), False, "cat"),
        (r"\Bcat", (" ", "cat"), False, ""),
        (r"\Bcat", ("n", "cat"), True, "cat"),
        ("^b", ("a", "b"), False, ""),
        ("^b", ("b",), True, "b"),
        (r"\Ab", ("b ", "b"), True, "b"),
        ("(?m)^b", ("a\n", "b"), True, "b"),
        ("(?m)^b", ("a", "b"), False, ""),
        ("b$", ("ab", "c"), True, "b"),
        (r"ab\b", ("a", "b", "c"), True, "ab"),
        (r"ab\B", ("a", "b", "c"), True, "ab"),
        (r"ab\B", ("a", "b", " "), False, ""),
        ("a.b", ("a", "\u00e9", "b"), True, "a\u00e9b"),
        ("\u00e9+!", ("e\u00e9", "\u00e9"), False, "\u00e9\u00e9"),
        ("a|ab", ("ab",), True, "a"),
        ("a+?b?", ("aab",), True, "a"),
    ],
)
def test_a_match_is_that_of_the_text_so_far(pattern: str, pieces: tuple[str, ...], matched: bool, text: str) -> None:
    match, found = read(matcher_of(pattern), *pieces)
    assert (match is not None, found) == (matched, text)


def test_the_match_that_starts_first_counts_and_of_those_the_first_patterns() -> None:
    assert read(matcher_of("cd", "bcd", "bc"), "abcd") == (RegexMatch("bcd", 3, 0), "bcd")
    assert read(matcher_of("cd", "bc", "bcd"), "abcd") == (RegexMatch("bc", 3, 1), "bc")


def test_what_is_passed_over_is_no_part_of_a_match_and_what_is_left_may_begin_one() -> None:
    matcher = matcher_of("aa+b?|c")
    matcher.skip("aa")
    assert matcher.held_len == 0
    assert matcher.feed("a") is None
    assert matcher.feed("b") is None
    matcher.skip("ca")
    assert matcher.held_len == 1
    assert matcher.feed("a") == RegexMatch("aa+b?|c", 2, 0)


def test_a_peek_tells_what_comes_and_changes_nothing() -> None:
    matcher = matcher_of("ab")
    assert matcher.feed("a") is None
    assert matcher.peek("c") is None
    assert matcher.peek("b") == RegexMatch("ab", 2, 0)
    assert matcher.held_len == 1
    assert matcher.feed("b") == RegexMatch("ab", 2, 0)


def test_a_match_without_end_is_known_by_its_last_part() -> None:
    regexes = compile_stop_regexes(("[0-9]+:",))
    matcher, max_held = RegexMatcher(regexes), regexes.max_held_bytes
    for _ in range(3000):
        assert matcher.feed("123") is None
    assert matcher.held_len == max_held
    assert matcher.feed("4:") == RegexMatch("[0-9]+:", max_held + 2, 0)


def test_a_match_whose_beginning_is_too_long_ago_is_not_seen_and_holds_nothing_for_ever() -> None:
    regexes = compile_stop_regexes((r"BEGIN[\s\S]*END",))
    matcher = RegexMatcher(regexes)
    assert matcher.feed("BEGIN") is None
    assert matcher.feed("x" * (regexes.max_held_bytes - 10)) is None
    assert matcher.peek("END") is not None
    assert matcher.feed("x" * 10) is None
    assert matcher.feed("x") is None
    assert matcher.held_len == 0
    assert matcher.feed("END") is None


def test_a_held_text_that_is_cut_begins_with_a_whole_character() -> None:
    regexes = compile_stop_regexes(("\u00e9+:",))
    matcher = RegexMatcher(regexes)
    for _ in range(MAX_HELD_BYTES):
        assert matcher.feed("\u00e9") is None
    assert matcher.held_len == regexes.max_held_bytes // 2
    assert matcher.feed("x") is None
    assert matcher.feed("\u00e9:") == RegexMatch("\u00e9+:", 2, 0)


def broken(search: str, beginning: str = r"(?:a?)\z") -> RegexMatcher:
    """A matcher of what is never accepted."""
    return RegexMatcher(StopRegexes((search,), (re2.compile(search),), re2.compile(beginning), MAX_HELD_BYTES))


def test_a_regex_that_matches_the_empty_text_raises_and_never_goes_round_for_ever() -> None:
    for read_piece in (broken("a*").skip, broken("a*").feed, broken("a*").peek, broken(r"\B").skip):
        with pytest.raises(BrokenRegex):
            read_piece("b\u00e9")


def test_beginnings_that_are_not_found_raise() -> None:
    with pytest.raises(BrokenRegex):
        broken("b", beginning=r"a\z").feed("x")


def test_a_match_of_a_part_of_a_character_is_one_of_the_character() -> None:
    matcher = broken(r"\C{3}")
    assert matcher.feed("\u00e9\u00e9x") == RegexMatch(r"\C{3}", 3, 1)
    matcher = broken(r"\xa9|\C\z")
    assert matcher.feed("a\u00e9") == RegexMatch(r"\xa9|\C\z", 1, 0)


def test_no_stop_regexes_need_no_matcher() -> None:
    assert make_regex_matcher(()) is None


LONG = {
    "nothing is held": (r"\n\n(?:User|Human):", ENGLISH),
    "a word is held": (r"\w+:", ENGLISH),
    "all is held": (r"[\s\S]*END", ENGLISH),
    "catastrophe of backtracking": ("(a+)+b", "a"),
    "another one": ("(x+x+)+y", "x"),
    "spaces": (r"\s+$x", " "),
    "many states": ("[ab]*a[ab]{60}c", "abbabaab"),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_token_of_a_long_output_costs_what_one_of_a_short_output_does(kind: str) -> None:
    pattern, text = LONG[kind]
    matcher, text = matcher_of(pattern), text * 60_000
    seconds = []
    for start in range(0, 60_000, 4):
        before = time.perf_counter()
        match = matcher.feed(text[start : start + 4])
        seconds.append(time.perf_counter() - before)
        assert match is None
        assert matcher.held_len <= MAX_HELD_BYTES
    assert median(seconds[-2000:]) < 4 * median(seconds[2000:4000]) + 50e-6
