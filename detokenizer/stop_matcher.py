"""Stop strings over a stream of text: an Aho-Corasick automaton, one transition a character.

The stop string that ends first in the text wins, and of those that end at one place the longest. That depends on the
text alone, never on how it was cut into tokens. A state's `held_len` is the length of the longest suffix of the text
that a stop string may still begin with: what a stream must hold back, and no more.
Method: Aho, Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6), 1975.
"""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

START = 0


class StopMatch(NamedTuple):
    """`stop` ends right before `end` in the piece of text that was fed."""

    stop: str
    end: int


class StopMatcher:
    """The automaton of some stop strings. It never changes: requests with the same stop strings share it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [START]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        self.held_len = [0]
        depths = [0]
        for stop in stops:
            self._match[self._insert(stop, depths)] = stop
        for state, character, child in self._breadth_first():
            self._link(state, character, child, depths[child])

    def feed(self, state: int, piece: str) -> tuple[int, StopMatch | None]:
        """Read a piece of text from `state`; the new state, and the match that came first (reading stops there)."""
        for position, character in enumerate(piece):
            state = self._step(state, character)
            stop = self._match[state]
            if stop is not None:
                return state, StopMatch(stop, position + 1)
        return state, None

    def skip(self, state: int, piece: str) -> int:
        """The state after a piece in which matches do not count."""
        for character in piece:
            state = self._step(state, character)
        return state

    def _step(self, state: int, character: str) -> int:
        while (child := self._next[state].get(character)) is None:
            if state == START:
                return START
            state = self._fail[state]
        return child

    def _insert(self, stop: str, depths: list[int]) -> int:
        state = START
        for character in stop:
            child = self._next[state].get(character)
            if child is None:
                child = len(self._next)
                self._next[state][character] = child
                self._next.append({})
                self._fail.append(START)
                self._match.append(None)
                self.held_len.append(0)
                depths.append(depths[state] + 1)
            state = child
        return state

    def _breadth_first(self) -> Iterator[tuple[int, str, int]]:
        queue = deque([START])
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                yield state, character, child
                queue.append(child)

    def _link(self, state: int, character: str, child: int, depth: int) -> None:
        """Complete a state whose shorter suffixes are complete already."""
        fail = START if state == START else self._step(self._fail[state], character)
        self._fail[child] = fail
        if self._match[child] is None:
            self._match[child] = self._match[fail]
        self.held_len[child] = depth if self._next[child] else self.held_len[fail]


@lru_cache(maxsize=64)
def make_matcher(stops: tuple[str, ...]) -> StopMatcher | None:
    """The automaton of these stop strings, None where there are none."""
    return StopMatcher(stops) if stops else None
