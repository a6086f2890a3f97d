"""Stop regexes: compiled by RE2 within limits, so that no pattern of a client costs more than a bound.

RE2 matches in time linear in the text, whatever the pattern. The limits hold down the factor and the memory. They are
checked at the edge, where a pattern beyond them is a 400, and again in the detokenizer.
"""

from typing import Any, NamedTuple

import re2

from .regex_beginnings import UnsupportedSyntax, read_regex
from .sampling_params import InvalidParam

MAX_PROGRAM_SIZE = 1024  # instructions of all regexes of a request; a text of n bytes costs at most n times as many
MAX_BYTES = 256 * 1024  # what one compiled regex may use, its cache of states included


class StopRegexes(NamedTuple):
    r"""Compiled: `searches` finds each pattern's matches, `beginning` where a match may begin that is not complete.

    `beginning` always matches, up to the end of the text; its match starts at the first place from which the text may
    be the beginning of a match.
    """

    patterns: tuple[str, ...]
    searches: tuple[Any, ...]
    beginning: Any


def compile_stop_regexes(patterns: tuple[str, ...]) -> StopRegexes:
    """Compile the stop regexes of one request; InvalidParam for what RE2 refuses or a limit forbids."""
    searches = [_compile(pattern, pattern) for pattern in patterns]
    begun = []
    for pattern in patterns:
        try:
            piece = read_regex(pattern)
        except UnsupportedSyntax as error:
            raise _refusal(pattern, str(error)) from None
        if piece.min_len == 0:
            raise _refusal(pattern, "it matches the empty text, and would end every request at once")
        begun.append(piece.begun)
    beginning = _compile(rf"(?:{'|'.join(begun)})\z", ", ".join(patterns))
    if sum(regex.programsize for regex in (*searches, beginning)) > MAX_PROGRAM_SIZE:
        raise InvalidParam("stop_regex", "stop_regex: the patterns are too large together; repeat less in {n,m}")
    return StopRegexes(patterns, tuple(searches), beginning)


def _compile(regex: str, pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = MAX_BYTES
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
