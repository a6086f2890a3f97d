"""Random regexes, most of them odd: each is refused, or agrees with RE2's searches in all of the text so far."""

import random
import time
from collections.abc import Iterator

import re2

from millstream.common.sampling_params import InvalidParam
from millstream.common.stop_regex import StopRegexes, compile_stop_regexes
from millstream.detokenizer.regex_matcher import RegexMatcher

PLAIN = ["a", "b", "x", "1", "0", ",", "{", "}", "]", "-", ":", " ", "\n", "\u00e9", "\u4e2d", "A", "K", "\u212a"]
KINDS = [".", r"\d", r"\w", r"\s", r"\W", r"\pL", r"\p{Greek}", r"\PN", r"\p{^Lu}", "[ab]", "[^a]", "[[:digit:]x]"]
ESCAPES = [r"\n", r"\.", r"\{", r"\x41", r"\x{e9}", r"\0", r"\101", r"\60", r"\_", r"\-", r"\C", r"\Q", r"\E", r"\e"]
CLASSES = ["[]a]", "[^]a]", "[a-]", "[-a]", "[+-[:digit:]]", "[[x]", "[[:x]", r"[\]a]", r"[\d-a]", "[--a]", "[a-b-x]"]
CLASSES += [r"[\x00-\x{e9}]", "[^\n-]", "[a&&b]", "[[:^alpha:]]", "[[:word:]-]", r"[\pL\n]", "[1-[a]", "[]", "[]-a]"]
ANCHORS = ["^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z", "(?m:^)", "(?m:$)"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "*+", "{2}", "{0}", "{1,3}", "{2,}", "{0,2}?", "{01}", "{1,02}", "{,2}"]
REPEATS += ["{2,1}", "{ 1}", "{1", "{30}", "{99999999999}", "{1,99999999999}", "{1001}", "{1}{2}", "{00}", "{1,2}+"]
FLAGS = ["(?i)", "(?s)", "(?m)", "(?U)", "(?-i)", "(?i-i)", "(?im-s)", "(?)", "(?x)", "(?is)"]
OPENED = ["(", "(", "(?:", "(?:", "(?:", "(?i:", "(?s-i:", "(?-:", "(?P<n>", "(?<m>", "(?=", "(?i-m:", "(?U:"]
LETTERS = "aabbx10,{}]-: \n\n\u00e9\u4e2dAK\u212a.\\_\x00"


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A few parts, nested, most of them repeated, joined or divided."""
    parts = [_random_part(rng, depth) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    return ("|" if rng.random() < 0.15 else "").join(parts)


def _random_part(rng: random.Random, depth: int) -> str:
    if depth and rng.random() < 0.45:
        part = rng.choice(OPENED) + random_regex(rng, depth - 1) + ")"
    else:
        kinds = [(PLAIN, 8), (KINDS, 3), (ESCAPES, 1), (CLASSES, 2), (ANCHORS, 2), (FLAGS, 0.5)]
        part = rng.choice(rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0])
    return part + (rng.choice(REPEATS) if rng.random() < 0.3 else "")


def random_pieces(rng: random.Random) -> list[str]:
    letters = rng.choice([LETTERS, "ab", "a1{,}", "\u00e9\u4e2d\n", "aA kK\u212a\n"])
    return ["".join(rng.choices(letters, k=rng.choice([0, 1, 1, 2, 3]))) for _ in range(12)]


def accepted(rng: random.Random, num_regexes: int) -> Iterator[StopRegexes]:
    """Of so many lists of regexes those that are not refused."""
    for _ in range(num_regexes):
        try:
            yield compile_stop_regexes(tuple(random_regex(rng) for _ in range(rng.choice([1, 1, 1, 2]))))
        except InvalidParam as error:
            assert error.param == "stop_regex"  # noqa: PT017 - what is refused is counted by the caller


def check_agrees(regexes: StopRegexes, pieces: list[str], num_skipped: int) -> bool:
    """The match is the first in the text so far at every piece, in place and time; whether there was one."""
    matcher, searches = RegexMatcher(regexes), [re2.compile(pattern) for pattern in regexes.patterns]
    text, base = "", 0
    for index, piece in enumerate(pieces):
        text += piece
        found = first_match(searches, text, base)
        if index < num_skipped:
            matcher.skip(piece)
            while found is not None:
                base = found[2]
                found = first_match(searches, text, base)
            continue
        if not piece:
            found = None  # a token without text ends nothing
        match = matcher.feed(piece)
        told = match and (len(text) - match.start, regexes.patterns.index(match.pattern), len(text) - match.end)
        assert told == found, (regexes.patterns, pieces, num_skipped)
        if found is not None:
            return True
    return False


def first_match(searches: list[re2._Regexp], text: str, base: int) -> tuple[int, int, int] | None:
    """Start, number of the pattern, end."""
    found = [(index, regex.search(text, base)) for index, regex in enumerate(searches)]
    return min(((match.start(), index, match.end()) for index, match in found if match), default=None)


def check_many(seed: int, num_regexes: int) -> tuple[int, int]:
    """How many were accepted, and in how many texts they had a match."""
    rng, num_accepted, num_matches = random.Random(seed), 0, 0
    for regexes in accepted(rng, num_regexes):
        num_accepted += 1
        for _ in range(4):
            pieces = random_pieces(rng)
            if len("".join(pieces).encode()) <= regexes.max_held_bytes:
                num_matches += check_agrees(regexes, pieces, rng.choice([0, 0, 3]))
    return num_accepted, num_matches


def test_a_regex_is_refused_or_agrees_with_searches_of_the_whole_text() -> None:
    num_accepted, num_matches = check_many(seed=1, num_regexes=8000)
    assert num_accepted > 1500
    assert num_matches > 1500


NASTY = [".", "a", r"\pL", "[^b]", r"\s", "(?:.?)", "(?:a|.)", r"(?i:[a-z])", "\u4e2d", r"\w"]
NASTY_REPEATS = ["*", "+", "?", "{2}", "{5}", "{10}", "{30}", "{0,9}", "{3,}", "{2,20}", "{60}", ""]


def nasty_regex(rng: random.Random) -> str:
    regex = rng.choice(NASTY) + rng.choice(NASTY_REPEATS)
    for _ in range(rng.choice([0, 1, 1, 2])):
        shape = rng.choice(["(?:{0}){2}", "(?:{0}{1}){2}", "(?:{1}{0}){2}", "(?:{0}|{1}){2}", "{1}*{0}"])
        regex = shape.format(regex, rng.choice(NASTY), rng.choice(NASTY_REPEATS))
    return regex + rng.choice([r"\x00", "!", r"[\x00!]", r"\b\x00"])


def seconds_a_token(regexes: StopRegexes, text: str) -> list[float]:
    """What each token of four characters costs this thread, once for the text to be held and once when it is."""
    matcher, seconds = RegexMatcher(regexes), []
    for start in range(0, len(text), 4):
        before = time.thread_time()
        assert matcher.feed(text[start : start + 4]) is None
        seconds.append(time.thread_time() - before)
    return seconds


KNOWN_NASTY = ["[ab]*a[ab]{60}c", "[ab]*a[ab]{10}c", r"(?:.{1,30}.?)+\x00", r"(?:.{0,9}a)+\x00", r"[^b]*a.{20}\x00"]


def test_no_accepted_regex_costs_more_than_its_bound() -> None:
    rng, worst, means = random.Random(1), 0.0, []
    for pattern in [*KNOWN_NASTY, *(nasty_regex(rng) for _ in range(150))]:
        try:
            regexes = compile_stop_regexes((pattern,))
        except InvalidParam:
            continue
        letters = rng.choice(["ab", "ab", "ab \n", "a\u00e9\u4e2d\U0001f600", "aaaaaaaaa\n"])
        seconds = seconds_a_token(regexes, "".join(rng.choices(letters, k=1200)))
        means.append(sum(seconds) / len(seconds))
        worst = max(worst, sorted(seconds)[-5])
    assert len(means) > 50
    assert max(means) < 0.5e-3
    assert worst < 1e-3
