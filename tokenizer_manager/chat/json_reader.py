"""JSON in a model's text, checked and handed on character by character as it comes.

What models get wrong in strings is put right: raw control characters are escaped, and a backslash that escapes nothing
is taken as one.
"""

import re
from collections.abc import Callable

from .text_reader import Malformed, Reading, TextReader

MAX_DEPTH = 64
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
NUMBER_RUN = re.compile(r"[-+.eE0-9]+")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
ESCAPES = frozenset('"\\/bfnrt')
LITERALS = {"t": "true", "f": "false", "n": "null"}

Emit = Callable[[str], None]


class JSONReader:
    """Reads one value after another from a text."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def value(self, emit: Emit, depth: int = 0) -> Reading[None]:
        """Emit the text of the value that comes next; Malformed where it is none."""
        start = yield from self._reader.peek()
        if depth > MAX_DEPTH:
            raise Malformed
        if start == "{":
            yield from self._members("}", emit, depth)
        elif start == "[":
            yield from self._members("]", emit, depth)
        elif start == '"':
            yield from self.string(emit)
        elif start in LITERALS:
            yield from self._reader.expect(LITERALS[start])
            emit(LITERALS[start])
        else:
            yield from self._number(emit)

    def space(self, emit: Emit) -> Reading[str]:
        """Emit white space; returns the next character."""
        while (char := (yield from self._reader.peek())) and char in " \t\r\n":
            emit(self._reader.take(1))
        return char

    def string(self, emit: Emit) -> Reading[None]:
        """Emit the text of a string, quotes included."""
        yield from self._reader.expect('"')
        emit('"')
        while True:
            emit(self._reader.take_match(STRING_RUN))
            char = yield from self._reader.peek()
            if char == "":
                raise Malformed
            if char == '"':
                emit(self._reader.take(1))
                return
            if char == "\\":
                yield from self._escape(emit)
            elif char < " ":
                emit(f"\\u{ord(self._reader.take(1)):04x}")

    def _members(self, close: str, emit: Emit, depth: int) -> Reading[None]:
        """An object or a list, as its last character says."""
        emit(self._reader.take(1))
        char = yield from self.space(emit)
        if char == close:
            emit(self._reader.take(1))
            return
        while True:
            if close == "}":
                yield from self.string(emit)
                yield from self.colon(emit)
            yield from self.value(emit, depth + 1)
            char = yield from self.space(emit)
            if char not in (",", close):
                raise Malformed
            emit(self._reader.take(1))
            if char == close:
                return
            yield from self.space(emit)

    def colon(self, emit: Emit) -> Reading[None]:
        """Emit what stands between a key and its value."""
        if (yield from self.space(emit)) != ":":
            raise Malformed
        emit(self._reader.take(1))
        yield from self.space(emit)

    def _escape(self, emit: Emit) -> Reading[None]:
        backslash = self._reader.take(1)
        char = yield from self._reader.peek()
        if char == "" or char in ESCAPES:
            emit(backslash + self._reader.take(1))
        elif char == "u":
            digits = self._reader.take(1)
            while len(digits) < 5 and (char := (yield from self._reader.peek())) in HEX_DIGITS and char:
                digits += self._reader.take(1)
            emit((backslash if len(digits) == 5 else 2 * backslash) + digits)
        else:
            emit(2 * backslash)

    def _number(self, emit: Emit) -> Reading[None]:
        pieces: list[str] = []
        while run := self._reader.take_match(NUMBER_RUN):
            emit(run)
            pieces.append(run)
            yield from self._reader.peek()
        if not NUMBER.fullmatch("".join(pieces)):
            raise Malformed
