"""Stop regexes: compiled by RE2 within limits, so that no pattern of a client costs more than a bound.

RE2 matches in time linear in the text, whatever the pattern; at worst a byte costs a step for each instruction of its
program. So the text that is searched for each token is bounded: `max_held_bytes` times the size of the programs is at
most MAX_WORK, less than a millisecond; an ordinary pattern takes microseconds. A pattern that can match only so much, and
more than that, is refused. The limits are checked at the edge, where a pattern beyond them is a 400, and again in the
detokenizer.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import re2

from .regex_beginnings import Piece, UnsupportedSyntax, read_regex
from .sampling_params import InvalidParam

MAX_PROGRAM_SIZE = 4096  # instructions of all regexes of a request together
MAX_WORK = 64 * 1024  # bytes times instructions
MAX_HELD_BYTES = 4096
MAX_REGEX_BYTES = 256 * 1024  # what one compiled regex may use, its cache of states included
MAX_CHARACTER_BYTES = 4
MATCHES_NOTHING = "it matches the empty text, and would end every request at once"
TOO_LARGE = "stop_regex: too large, alone or together; use smaller numbers in {n,m}, or plainer classes"


PROBES = [before + after for before in (b"", b"a", b"\n", b" ") for after in (b"", b"a", b"\n", b" ", b"\xc3\xa9")]


class StopRegexes(NamedTuple):
    r"""Compiled: `searches` finds each pattern's matches, `beginning` where a match may begin that is not complete.

    `beginning` always matches, up to the end of the text; its match starts at the first place from which the text may
    be the beginning of a match. Such text is held, up to `max_held_bytes`.
    """

    patterns: tuple[str, ...]
    searches: tuple[Any, ...]
    beginning: Any
    max_held_bytes: int


@lru_cache(maxsize=32)
def compile_stop_regexes(patterns: tuple[str, ...]) -> StopRegexes:
    """Compile the stop regexes of one request; InvalidParam for what RE2 refuses or a limit forbids."""
    searches = [_compile(pattern, pattern) for pattern in patterns]
    pieces = [_read(pattern) for pattern in patterns]
    beginning = _compile(rf"(?:{'|'.join(piece.begun for piece in pieces)})\z", ", ".join(patterns))
    check_by_trial(patterns, searches, beginning)
    program_size = sum(regex.programsize for regex in (*searches, beginning))
    max_held_bytes = min(MAX_HELD_BYTES, MAX_WORK // program_size)
    longest = max(map(_max_bytes, pieces, searches))
    if program_size > MAX_PROGRAM_SIZE or longest > max_held_bytes:
        raise InvalidParam("stop_regex", TOO_LARGE)
    return StopRegexes(patterns, tuple(searches), beginning, max_held_bytes)


def _max_bytes(piece: Piece, search: Any) -> int:
    """A bound of what a pattern matches (0: it has none). A program without loops has an instruction for every byte."""
    return 0 if piece.max_len is None else min(piece.max_len * MAX_CHARACTER_BYTES, search.programsize)


def _read(pattern: str) -> Piece:
    try:
        piece = read_regex(pattern)
    except UnsupportedSyntax as error:
        raise _refusal(pattern, str(error)) from None
    if piece.min_len == 0:
        raise _refusal(pattern, MATCHES_NOTHING)
    return piece


def check_by_trial(patterns: tuple[str, ...], searches: list[Any], beginning: Any) -> None:
    """What must be true of every accepted pattern, asked of RE2 itself and so whatever the reader has understood."""
    for text in PROBES:
        for start in range(len(text) + 1):
            for pattern, regex in zip(patterns, searches, strict=True):
                match = regex.search(text, start)
                if match is not None and match.start() == match.end():
                    raise _refusal(pattern, MATCHES_NOTHING)
            if beginning.search(text, start) is None:
                raise _refusal(", ".join(patterns), "its beginnings are not known")


def _compile(regex: str, pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = MAX_REGEX_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(regex, options)
    except UnicodeEncodeError:
        raise _refusal(pattern, "it is not valid Unicode") from None
    except re2.error as error:
        (reason,) = error.args
        raise _refusal(pattern, reason.decode() if isinstance(reason, bytes) else str(reason)) from None


def _refusal(pattern: str, reason: str) -> InvalidParam:
    return InvalidParam("stop_regex", f"stop_regex {pattern!a}: {reason}")
