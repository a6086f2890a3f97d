"""What a stop regex may cost, and the regex of its beginnings."""

import pytest
import re2

from millstream.common.regex_beginnings import read_regex
from millstream.common.sampling_params import (
    MAX_STOP_REGEX_LEN,
    MAX_STOP_REGEXES,
    InvalidParam,
    SamplingParams,
    check_sampling_params,
)
from millstream.common.stop_regex import MAX_HELD_BYTES, MAX_PROGRAM_SIZE, MAX_WORK, compile_stop_regexes

HELD: list[tuple[str, str, str]] = [
    ("abc", "xxab", "ab"),
    ("abc", "xxabx", ""),
    ("aab", "aaa", "aa"),
    (r"\n\n(?:User|Human):", "Hi.\n\nHum", "\n\nHum"),
    (r"\n\n(?:User|Human):", "Hi.\n\nHem", ""),
    (r"\d{1,3}\.", "in 1234", "234"),
    (r"\d{1,3}\.", "in 12 ", ""),
    (r"[^\n]+:", "one\ntwo", "two"),
    (r"(?i)stop", "xxSTo", "STo"),
    (r"(?:(?i)st)op", "xxSTo", "STo"),
    (r"(?:(?i)st)op", "xxSTO", ""),
    (r"x(?i:a|b)Y", "xB", "xB"),
    (r"x(?i:a|b)Y", "xBy", ""),
    (r"a(?s:.)c|a.d", "a\n", "a\n"),
    (r"a.d", "a\n", ""),
    (r"(?m)^end$", "x\nen", "en"),
    (r"(?m)^end$", "xen", ""),
    (r"\bcat\b!", "a cat", "cat"),
    (r"\bcat\b!", "acat", ""),
    (r"^abc", "xab", ""),
    ("(ab){2,3}c", "ababab", "ababab"),
    ("(ab){2,3}c", "abababab", "ababab"),
    ("(?:a+b)+c", "xaabab", "aabab"),
    (r"[]x]y", "a]", "]"),
    (r"[^]x]y", "a]", ""),
    (r"[[:digit:]x]+y", "a1x", "1x"),
    (r"[\]\\]!", "a\\", "\\"),
    (r"\x{e9}t\xe9", "caf\u00e9t", "\u00e9t"),
    (r"\p{Greek}\pN!", "a\u03b1", "\u03b1"),
    (r"a{,2}b", "a{,", "a{,"),
    (r"a{x", "a{", "a{"),
    (r"(?P<n>a)(?<m>b)c", "ab", "ab"),
    ("ab||cd", "", ""),
]


@pytest.mark.parametrize(("pattern", "text", "held"), HELD)
def test_what_a_match_may_begin_with_is_found_and_no_more(pattern: str, text: str, held: str) -> None:
    begun = re2.compile(rf"(?:{read_regex(pattern).begun})\z")
    assert text[begun.search(text).start() :] == held


@pytest.mark.parametrize(
    ("pattern", "lens"),
    [
        ("abc", (3, 3)),
        ("a|bcd|", (0, 3)),
        ("a{2,5}b?", (2, 6)),
        ("(ab+){2}", (4, None)),
        (r"^\b$", (0, 0)),
        (r"(?:\b)*x", (1, 1)),
        (r"[a-z]{0}x", (1, 1)),
        (r"\pL\x{1F600}\101[[:alpha:]-]", (4, 4)),
        ("(?i)k(?-i)k", (2, 2)),
    ],
)
def test_the_lengths_of_matches_are_known(pattern: str, lens: tuple[int, int | None]) -> None:
    re2.compile(pattern)
    piece = read_regex(pattern)
    assert (piece.min_len, piece.max_len) == lens


@pytest.mark.parametrize("pattern", [r"\QA.B\E", r"\C", "a\ud800b", "", "x?", r"\b", "(?P=n)", "a**", "(?x)a"])
def test_what_cannot_be_served_is_refused_with_its_reason(pattern: str) -> None:
    with pytest.raises(InvalidParam, match=r"^stop_regex ") as refusal:
        compile_stop_regexes((pattern,))
    assert refusal.value.param == "stop_regex"


def test_the_work_of_a_token_is_bounded_whatever_the_pattern() -> None:
    compiled = [compile_stop_regexes(patterns) for patterns in ((r"[\s\S]*END",), ("[ab]*a[ab]{300}c",), (r"\pL\pN",))]
    for regexes in compiled:
        size = sum(regex.programsize for regex in (*regexes.searches, regexes.beginning))
        assert size <= MAX_PROGRAM_SIZE
        assert regexes.max_held_bytes * size <= MAX_WORK
        assert 0 < regexes.max_held_bytes <= MAX_HELD_BYTES
    assert compiled[0].max_held_bytes == MAX_HELD_BYTES


def test_a_pattern_that_matches_more_than_may_be_held_is_refused() -> None:
    assert compile_stop_regexes(("x{100}y",)).max_held_bytes >= 101
    with pytest.raises(InvalidParam, match="too large"):
        compile_stop_regexes(("x{900}y",))


def test_number_and_length_are_checked_without_compiling() -> None:
    params = SamplingParams(stop_regex=("(",) * MAX_STOP_REGEXES)
    check_sampling_params(params, 10)
    for bad in (("a",) * (MAX_STOP_REGEXES + 1), ("a" * (MAX_STOP_REGEX_LEN + 1),), ("",)):
        with pytest.raises(InvalidParam, match="stop_regex"):
            check_sampling_params(SamplingParams(stop_regex=bad), 10)
