r"""From a regex to the regex of its beginnings: of every text that a match of it may start with.

RE2 says whether a text has a match, not whether it ends in half of one. A stream must know: such an end is held back.
So a pattern is read into pieces, each with the text of a regex for it and of one for its beginnings:

    beginnings of a character    it or nothing         beginnings of x|y       those of x, or of y
    beginnings of xy             those of x, or x and those of y
    beginnings of x{n,m}         x{0,m-1} and those of x

What may stand before the end of the text is found by RE2 with the beginnings and `\z` behind them.
The syntax is RE2's, and the pattern one that RE2 has compiled: only what RE2 accepts is told apart here.
Flags such as (?i) are written to every character they hold for, so that a piece means the same anywhere.
"""

import re
from functools import reduce
from typing import NamedTuple

ATOM = re.compile(
    r"""
      \\ (?: [pP] (?: \{[^}]*\} | . ) | x (?: \{[0-9A-Fa-f]+\} | [0-9A-Fa-f]{2} ) | [0-7]{1,3} | . )
    | \[ \^? \]? (?: \[:\^?[a-z]+:\] | \\. | [^\]\\] )*+ \]
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
OPEN = re.compile(r"\((?:\?(?:P?<[^>]*>|(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]*))?(?P<close>[:)])))?")
REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>[0-9]+)(?P<comma>,(?P<high>[0-9]*))?\})\??")
ASSERTIONS = frozenset(["^", "$", r"\A", r"\z", r"\b", r"\B"])
REFUSED = {r"\C": "single bytes", r"\Q": "quoting"}
SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class UnsupportedSyntax(ValueError):
    """RE2 takes this, and we do not."""


class Piece(NamedTuple):
    """A part of a pattern: a regex of it, one of its beginnings, and how many characters it has (None: any number)."""

    whole: str
    begun: str
    min_len: int
    max_len: int | None
    is_single: bool = False  # a character or an assertion: nothing lies between none of it and all of it


NOTHING = Piece("", "", 0, 0)


def read_regex(pattern: str) -> Piece:
    """The pattern as one piece; UnsupportedSyntax for the few things of RE2 that can't be served."""
    return _Reader(pattern).read()


class _Reader:
    """Recursive descent; `_flags` are those of i, m and s that are on, until their group ends."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags: frozenset[str] = frozenset()

    def read(self) -> Piece:
        piece = self._alternatives()
        if self._at < len(self._pattern):
            raise UnsupportedSyntax(f"the syntax at character {self._at} is not supported")
        return piece

    def _alternatives(self) -> Piece:
        branches = [self._sequence()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self) -> Piece:
        pieces = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            pieces.append(self._repeated(self._group() if self._pattern[self._at] == "(" else self._atom()))
        return reduce(lambda rest, first: _join(first, rest), reversed(pieces), NOTHING)

    def _group(self) -> Piece:
        found = OPEN.match(self._pattern, self._at)
        if found is None:
            raise UnsupportedSyntax(f"the group at character {self._at} is not supported")
        self._at, before = found.end(), self._flags
        self._flags = (before | set(found["on"] or "") - {"U"}) - set(found["off"] or "")
        if found["close"] == ")":
            return NOTHING
        piece = self._alternatives()
        self._at += 1  # the parenthesis that closes
        self._flags = before
        return piece

    def _atom(self) -> Piece:
        found = ATOM.match(self._pattern, self._at)
        assert found is not None
        self._at, text = found.end(), found[0]
        if text in REFUSED:
            raise UnsupportedSyntax(f"{text} ({REFUSED[text]}) is not supported")
        whole = f"(?{''.join(sorted(self._flags))}:{text})" if self._flags else text
        if text in ASSERTIONS:
            return Piece(whole, "", 0, 0, is_single=True)
        return Piece(whole, f"(?:{whole})?", 1, 1, is_single=True)

    def _repeated(self, piece: Piece) -> Piece:
        found = REPEAT.match(self._pattern, self._at)
        if found is None:
            return piece
        self._at = found.end()
        if found["sign"]:
            return _repeat(piece, *SIGNS[found["sign"]])
        low = int(found["low"])
        return _repeat(piece, low, int(found["high"]) if found["high"] else None if found["comma"] else low)


def _any_of(branches: list[Piece]) -> Piece:
    whole = "|".join(branch.whole for branch in branches)
    begun = "|".join(branch.begun for branch in branches)
    max_lens = [branch.max_len for branch in branches if branch.max_len is not None]
    max_len = max(max_lens) if len(max_lens) == len(branches) else None
    return Piece(f"(?:{whole})", f"(?:{begun})", min(branch.min_len for branch in branches), max_len)


def _join(first: Piece, rest: Piece) -> Piece:
    if first is NOTHING:
        return rest
    if not rest.begun:
        begun = first.begun
    elif first.is_single:
        begun = f"(?:{first.whole}{rest.begun})?"
    else:
        begun = f"(?:{first.begun}|{first.whole}{rest.begun})"
    max_len = None if first.max_len is None or rest.max_len is None else first.max_len + rest.max_len
    return Piece(first.whole + rest.whole, begun, first.min_len + rest.min_len, max_len)


def _repeat(piece: Piece, low: int, high: int | None) -> Piece:
    whole = f"(?:{piece.whole})" + "{%d,%s}" % (low, "" if high is None else high)  # noqa: UP031 - braces
    if not piece.begun or high == 0:
        return Piece(whole, "", low * piece.min_len, 0)
    before = "{0,}" if high is None else f"{{0,{high - 1}}}"
    max_len = None if high is None or piece.max_len is None else high * piece.max_len
    return Piece(whole, f"(?:{piece.whole}){before}{piece.begun}", low * piece.min_len, max_len)
