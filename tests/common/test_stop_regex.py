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
from millstream.common.stop_regex import (
    MAX_HELD_BYTES,
    MAX_PROGRAM_SIZE,
    MAX_WORK,
    check_by_trial,
    compile_stop_regexes,
)

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
    (r"(?i:st)op", "xxSTo", "STo"),
    (r"(?i:st)op", "xxSTO", ""),
    (r"(?i)(?s)a.(?-is:b.)", "xA\nb", "A\nb"),
    (r"(?i)(?s)a.(?-is:b.)", "xA\nB", ""),
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
    (r"[+\-[:digit:]]x", "-", "-"),
    (r"a{(?:1)}b", "a{1", "a{1"),
    (r"a\0(?:1)b", "a\x001", "a\x001"),
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
        (r"[a-z]{0}x", (1, 1)),
        (r"\pL\x{1F600}\101[[:alpha:]-]", (4, 4)),
        ("(?i)k(?-i:k)", (2, 2)),
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


FLAGS_IN_THE_MIDDLE = [
    "a(?i)*",
    "a(?i)*b",
    r"\n(?i){0}\B",
    "a(?i)+",
    "a(?i)b",
    "(?:(?i)a)b",
    "(?i)*a",
    "(?U)a+",
    "(?-i)a",
]
ODD_REPEATS = ["x{99999999999}", "x{1,99999999999}", "x{01}", "x{1,02}", "x{00}", "x{,2}", "x{1", "x{ 1}{1", "x{1001}y"]
REPEATS_OF_NOTHING = [
    r"a\b*",
    "a^{2}",
    "a$?",
    r"x(?:\b)*",
    "x()*",
    "x(?:a?)*",
    "x(?:a*)+",
    "(?:a|){2}x",
    "x(?:^|a){2,}",
]
REPEATS_OF_REPEATS = ["xa{2}{3}", "xa+*", "xa{2}+", "xa*??", "xa{1}?{2}"]
ODD_CLASSES = ["[+-[:digit:]]x", r"[\d-a]", "[a-b-x]", "[[:x]", "[--[:alpha:]]]"]
ODD_ESCAPES = [r"a\Z", r"a\e", r"a\8", r"a\1", r"a\pl", r"a\Q*\E", r"a\C", r"[\C]a", r"a\G", r"a\K"]


@pytest.mark.parametrize(
    "pattern",
    [*FLAGS_IN_THE_MIDDLE, *ODD_REPEATS, *REPEATS_OF_NOTHING, *REPEATS_OF_REPEATS, *ODD_CLASSES, *ODD_ESCAPES],
)
def test_syntax_that_readers_may_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidParam, match=r"^stop_regex '.*': ."):
        compile_stop_regexes((pattern,))


@pytest.mark.parametrize("pattern", [r"(?:(?:.?){30}.?)+\x00", r".*(?:.?){60}\x00", r"(?:(?:a|.?){9}b?)*\x00"])
def test_nested_repeats_that_cost_very_much_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidParam, match="can match the empty text"):
        compile_stop_regexes((pattern,))


@pytest.mark.parametrize("empty", ["a*", "a|", r"\B", r"\b", "^", "(?m:$)", "(?m:^)a?", r"\n{0}\B", r"\z", "$|a"])
def test_what_matches_the_empty_text_somewhere_is_found_without_reading_it(empty: str) -> None:
    regex, beginning = re2.compile(empty), re2.compile(r"(?:a?)\z")
    with pytest.raises(InvalidParam, match="empty text"):
        check_by_trial((empty,), [regex], beginning)


def test_beginnings_that_miss_the_empty_text_are_found_without_reading_them() -> None:
    with pytest.raises(InvalidParam, match="beginnings"):
        check_by_trial(("a",), [re2.compile("a")], re2.compile(r"a\z"))


def test_the_work_of_a_token_is_bounded_whatever_the_pattern() -> None:
    compiled = [compile_stop_regexes(patterns) for patterns in ((r"[\s\S]*END",), ("[ab]*a[ab]{300}c",), (r"\pL\pN",))]
    for regexes in compiled:
        size = sum(regex.programsize for regex in (*regexes.searches, regexes.beginning))
        assert size <= MAX_PROGRAM_SIZE
        assert regexes.max_held_bytes * size <= MAX_WORK
        assert 0 < regexes.max_held_bytes <= MAX_HELD_BYTES
    assert compile_stop_regexes((r"x+",)).max_held_bytes == MAX_HELD_BYTES


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
