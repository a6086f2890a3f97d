r"""From a regex to the regex of its beginnings: of every text that a match of it may start with.

RE2 says whether a text has a match, not whether it ends in half of one. A stream must know: such an end is held back.
So a pattern is read into pieces, each with the text of a regex for it and of one for its beginnings:

    beginnings of a character    it or nothing         beginnings of x|y       those of x, or of y
    beginnings of xy             those of x, or x and those of y
    beginnings of x{n,m}         x{0,m-1} and those of x

What may stand before the end of the text is found by RE2 with the beginnings and `\z` behind them.
Only syntax is read whose meaning is certain to be RE2's, in a pattern that RE2 has compiled; all else is refused. A
piece is written anew, never copied from the pattern with what stands around it: a character as `\x{...}`, every repeat
around a group, and flags such as (?i) at every character they hold for. So a piece means the same anywhere.
"""

import re
from functools import reduce
from typing import NamedTuple

ESCAPED_LETTERS = {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
CHARACTER = r"(?:\\x[0-9A-Fa-f]{2}|\\x\{[0-9A-Fa-f]{1,6}\}|\\0[0-7]{0,2}+|\\[1-7][0-7]{1,2}+|\\[atnvfr!-/:-@\[-`{-~])"
KIND = r"(?:\\[dDsSwW]|\\[pP](?:[A-Z]|\{\^?[A-Za-z_]+\}))"  # of characters
IN_CLASS = rf"(?:{CHARACTER}|[^\]\\\-\[]|\[(?!:))"
ASSERTION = re.compile(r"\^|\$|\\[AzbB]")
ONE_OF_MANY = re.compile(  # a hyphen in a class is its first character, its last, or between two
    rf"{KIND}|\.|\[\^?+\]?+-?+(?:\[:\^?[a-z]+:\]|{KIND}|{IN_CLASS}(?:-{IN_CLASS})?+)*+-?+\]", re.DOTALL
)
ONE = re.compile(rf"{CHARACTER}|\{{(?![0-9,])|[^\\.+*?()|\[{{^$]", re.DOTALL)
FLAGS_FOR_ALL = re.compile(r"(?:\(\?[ims]+\))*")
OPEN = re.compile(r"\((?:\?P?<[A-Za-z_][A-Za-z0-9_]*>|\?(?P<on>[ims]*)(?:-(?P<off>[ims]+))?:|(?!\?))")
REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>0|[1-9][0-9]{0,3})(?P<comma>,(?P<high>0|[1-9][0-9]{0,3})?)?\})\??")
MAX_REPEAT = 1000  # RE2's
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
    """The pattern as one piece; UnsupportedSyntax for what is not certain to mean what it means to RE2."""
    return _Reader(pattern).read()


class _Reader:
    """Recursive descent; `_flags` are those of i, m and s that are on, until their group ends."""

    def __init__(self, pattern: str) -> None:
        flags = FLAGS_FOR_ALL.match(pattern)
        assert flags is not None
        self._pattern = pattern
        self._at = flags.end()
        self._flags = frozenset(flags[0]) & frozenset("ims")

    def read(self) -> Piece:
        piece = self._alternatives()
        if self._at < len(self._pattern):
            raise self._unsupported()
        return piece

    def _unsupported(self) -> UnsupportedSyntax:
        return UnsupportedSyntax(f"{self._pattern[self._at : self._at + 8]!a} at character {self._at} is not supported")

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
        if found is None:  # flags in the middle among them: they are no part that a repeat could follow
            raise self._unsupported()
        self._at, before = found.end(), self._flags
        self._flags = (before | set(found["on"] or "")) - set(found["off"] or "")
        piece = self._alternatives()
        if not self._pattern.startswith(")", self._at):
            raise self._unsupported()
        self._at += 1
        self._flags = before
        return piece

    def _atom(self) -> Piece:
        if (found := ASSERTION.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            return Piece(self._with_flags(found[0]), "", 0, 0, is_single=True)
        if (found := ONE_OF_MANY.match(self._pattern, self._at)) is not None:
            text = found[0]
        elif (found := ONE.match(self._pattern, self._at)) is not None:
            text = rf"\x{{{_code_of(found[0]):x}}}"
        else:
            raise self._unsupported()
        self._at, whole = found.end(), self._with_flags(text)
        return Piece(whole, f"(?:{whole})?", 1, 1, is_single=True)

    def _with_flags(self, text: str) -> str:
        return f"(?{''.join(sorted(self._flags))}:{text})" if self._flags else text

    def _repeated(self, piece: Piece) -> Piece:
        found = REPEAT.match(self._pattern, self._at)
        if found is None:
            return piece
        low, high = _bounds(found)
        if piece.max_len == 0 or (piece.min_len == 0 and high not in {0, 1}):  # of the latter some cost very much
            raise UnsupportedSyntax(f"the repeat at character {self._at} is of what can match the empty text")
        if REPEAT.match(self._pattern, found.end()) or max(low, high or 0) > MAX_REPEAT:
            raise self._unsupported()
        self._at = found.end()
        return _repeat(piece, low, high)


def _code_of(character: str) -> int:
    """The code of a character as ONE reads it: itself, or an escape."""
    if not character.startswith("\\"):
        return ord(character)
    escaped = character[1:]
    if escaped[0] == "x":
        return int(escaped[1:].strip("{}"), 16)
    return int(escaped, 8) if escaped[0] in "01234567" else ESCAPED_LETTERS.get(escaped, ord(escaped[0]))


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    if found["sign"]:
        return SIGNS[found["sign"]]
    low = int(found["low"])
    return low, int(found["high"]) if found["high"] else None if found["comma"] else low


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
