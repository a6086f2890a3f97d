"""A model's text as it comes, for parsers that are generators: they yield where they need more of it.

A decision is made only when no further text could change it, so that the way in which the text is cut has no effect.
Every character is looked at a bounded number of times.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

MAX_HELD_SPACE = 64  # characters of white space that are held back ahead of a tag which may come
SPACE = re.compile(r"\s*")
NEVER = r"(?!)"

T = TypeVar("T")
Reading = Generator[None, None, T]


class Malformed(Exception):
    """The text is not what its beginning promised."""


class TextReader:
    """The text that has come and has not been taken."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._num_dropped = 0
        self._recorded_from: int | None = None
        self._record: list[str] = []

    @property
    def position(self) -> int:
        """How many characters have been taken."""
        return self._num_dropped + self._at

    def push(self, text: str) -> None:
        """Some more text has come."""
        if self._recorded_from is not None:
            self._record.append(self._text[self._recorded_from : self._at])
            self._recorded_from = 0
        self._text = self._text[self._at :] + text
        self._num_dropped += self._at
        self._at = 0

    def take(self, size: int) -> str:
        """The next `size` characters, which have come."""
        start, self._at = self._at, self._at + size
        return self._text[start : self._at]

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """What of the text that has come matches `pattern`, from here."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def record(self) -> None:
        """Keep what is taken from now on."""
        self._record.clear()
        self._recorded_from = self._at

    def recorded(self) -> str:
        """What was taken since `record`; ends it."""
        assert self._recorded_from is not None
        text = "".join(self._record) + self._text[self._recorded_from : self._at]
        self._recorded_from = None
        return text

    def peek(self) -> Reading[str]:
        """The next character; none at the end."""
        while not self.num_left and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip_space(self) -> Reading[None]:
        """Take white space."""
        while True:
            self.take_match(SPACE)
            if self.num_left or self.ended:
                return
            yield

    def find(self, literal: str) -> Reading[bool]:
        """Take `literal` where it comes next."""
        while self.num_left < len(literal) and self._may_become(literal, self._at) and not self.ended:
            yield
        found = self._text.startswith(literal, self._at)
        if found:
            self.take(len(literal))
        return found

    def comes(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next, or behind some white space; takes nothing."""
        while True:
            space = SPACE.match(self._text, self._at)
            assert space is not None
            if space.end() - self._at > MAX_HELD_SPACE:
                return False
            if self._text.startswith(literal, space.end()):
                return True
            if self.ended or not self._may_become(literal, space.end()):
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Take `literal`; Malformed where something else comes."""
        if not (yield from self.find(literal)):
            raise Malformed

    def until(self, literals: Sequence[str], limit: int) -> Reading[str]:
        """The text ahead of the first of `literals`, which stay; Malformed at the end or after `limit` characters."""
        longest = limit + max(map(len, literals))
        while True:
            places = [self._text.find(literal, self._at, self._at + longest) for literal in literals]
            sizes = [place - self._at for place in places if 0 <= place <= self._at + limit]
            if sizes:
                return self.take(min(sizes))
            if self.ended or self.num_left >= longest:
                raise Malformed
            yield

    def pass_until(
        self, tags: Sequence[str], emit: Callable[[str], None], *, keeps_end: bool = True, keeps_space: bool = False
    ) -> Reading[str]:
        """Emit text up to the first of `tags`, which is returned and not taken; "" if none comes.

        White space ahead of the tag is not taken either unless `keeps_space`, nor at the end of all unless `keeps_end`.
        """
        pattern = _any_of(tuple(tags))
        while True:
            found = pattern.search(self._text, self._at)
            place, tag = (found.start(), found[0]) if found else (len(self._text), "")
            text = self.take(place - self._at)
            is_last = self.ended and not tag
            begun = 0 if tag or is_last else max((_overlap(text, each) for each in tags), default=0)
            kept = text[: len(text) - begun]
            keeps = keeps_end if is_last else keeps_space or not tags
            kept = kept if keeps else _without_space(kept)
            self._at -= len(text) - len(kept)
            emit(kept)
            if tag or is_last:
                return tag
            yield

    @property
    def num_left(self) -> int:
        """How many characters have come and have not been taken."""
        return len(self._text) - self._at

    def _may_become(self, literal: str, start: int) -> bool:
        return literal.startswith(self._text[start : start + len(literal)])


@lru_cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the first of `tags` in one walk over the text, however many there are and whichever never comes."""
    return re.compile("|".join(map(re.escape, tags)) or NEVER)


def _overlap(text: str, tag: str) -> int:
    """The length of the longest beginning of `tag` that ends `text`."""
    start = max(0, len(text) - len(tag) + 1)
    while (start := text.find(tag[0], start)) >= 0:
        if tag.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def _without_space(text: str) -> str:
    """Without white space at its end, of which no more than MAX_HELD_SPACE characters go."""
    return text[: max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)]
