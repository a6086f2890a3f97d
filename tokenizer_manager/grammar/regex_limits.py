"""How much a regular expression of a client may repeat. What its syntax may be is the compiler's to say."""

import re

MAX_TEXT_CHARS = 2**13  # of a regex, or a text to be matched as it is: each costs a mask up to half a microsecond
MAX_REPEATS = 1000  # of one thing, quantifiers around one another multiplied
TOKEN = re.compile(
    r"\\[xuU]\{\w*\}|\\."  # an escaped character
    r"|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)"  # a class
    r"|\{(\d+)(?:,(\d*))?\}|[()]",
    re.DOTALL,
)
MAX_DIGITS = 9


class RegexError(ValueError):
    """The regex is refused."""


def check_regex(pattern: str) -> None:
    """RegexError where something may have to be repeated more than MAX_REPEATS times, or a NUL, or for its length. Linear."""
    if len(pattern) > MAX_TEXT_CHARS:
        raise RegexError(f"a regex must not have more than {MAX_TEXT_CHARS} characters")
    if "\0" in pattern:
        raise RegexError("a regex must not hold NUL")
    largest = [1]  # the largest product within each group that is open
    closed, closed_end = 1, -1
    for token in TOKEN.finditer(pattern):
        if token[0] == "(":
            largest.append(1)
        elif token[0] == ")" and len(largest) > 1:
            closed, closed_end = largest.pop(), token.end()
            largest[-1] = max(largest[-1], closed)
        elif token[1] is not None:
            inner = closed if token.start() == closed_end else 1
            repeats = inner * max(1, _number(token[1]), _number(token[2] or "0"))
            if repeats > MAX_REPEATS:
                raise RegexError(f"a regex must not repeat anything more than {MAX_REPEATS} times")
            closed, closed_end = repeats, token.end()
            largest[-1] = max(largest[-1], repeats)


def _number(digits: str) -> int:
    return int(digits[:MAX_DIGITS]) if len(digits) <= MAX_DIGITS else 10**MAX_DIGITS
