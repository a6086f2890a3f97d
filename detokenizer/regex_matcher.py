r"""Stop regexes over a stream of text.

The text ends at the first token after which the text so far has a match. Of several matches the one that starts first
counts, then the pattern given first. `$`, `\z` and `\b` see the end of the text so far; `^` its beginning. A match in
the tokens before `min_new_tokens` is passed over: the search goes on behind it.

A match that is not complete must not be sent yet, since it would be trimmed. So the matcher keeps the held text: what
may be the beginning of a match, from the first place where one may begin. A match that comes later starts there or
after it; so each token costs a search of the held and the new text, and never of what came before.

The held text is bounded (StopRegexes.max_held_bytes: some thousand bytes for a small pattern). What a pattern without
`*`, `+` or `{n,}` matches is never longer. Of a match with them that gets longer only that much of its end is known: it
still ends the text if the end alone matches (`[0-9]+:`), and then only the end is trimmed; if not
(`BEGIN[\s\S]*END`), it is not seen. All this is a function of the tokens: a request gets the same text whether it
streams or not.
"""

from typing import NamedTuple

from ..common.stop_regex import StopRegexes, compile_stop_regexes


class BrokenRegex(RuntimeError):
    """A compiled stop regex does what none may do."""


class RegexMatch(NamedTuple):
    """`pattern` matches from `start` to `end`: characters counted from the end of the text that was fed."""

    pattern: str
    start: int
    end: int


class RegexMatcher:
    """The stop regexes of one request. `held_len` is the number of characters at the text's end that must wait."""

    def __init__(self, regexes: StopRegexes) -> None:
        self._regexes = regexes
        self._seen = b""  # the byte before the held text, if there is one, for \b and ^; then the held text
        self._held_start = 0
        self.held_len = 0

    def peek(self, piece: str) -> RegexMatch | None:
        """The match that there would be after this piece; changes nothing."""
        text = self._seen + piece.encode()
        found = self._find(text, self._held_start)
        if found is None:
            return None
        begin, index, end = found
        return RegexMatch(self._regexes.patterns[index], len(text[begin:].decode()), len(text[end:].decode()))

    def feed(self, piece: str) -> RegexMatch | None:
        """Read the text of a token; the match that ends it (then nothing may follow)."""
        match = self.peek(piece) if piece else None
        if piece and match is None:
            self._hold(self._seen + piece.encode(), self._held_start)
        return match

    def skip(self, piece: str) -> None:
        """Read the text of a token that matches can't end."""
        text, start = self._seen + piece.encode(), self._held_start
        while (found := self._find(text, start)) is not None:
            _, _, start = found  # further on: no match is empty
        self._hold(text, start)

    def _find(self, text: bytes, start: int) -> tuple[int, int, int] | None:
        """Where the first match begins, its pattern's index, and where it ends: whole characters, at least one."""
        found = [(index, regex.search(text, start)) for index, regex in enumerate(self._regexes.searches)]
        first = min(((match.start(), index, match.end()) for index, match in found if match), default=None)
        if first is None:
            return None
        begin, index, end = first
        if end <= begin:
            raise BrokenRegex(f"stop_regex {self._regexes.patterns[index]!a} matches the empty text")
        while begin > start and _is_inside_character(text, begin):
            begin -= 1
        return begin, index, _next_character(text, end)

    def _hold(self, text: bytes, start: int) -> None:
        begun = self._regexes.beginning.search(text, start)
        if begun is None:
            raise BrokenRegex(f"the beginnings of stop_regex {self._regexes.patterns!a} miss the empty text")
        start = _next_character(text, max(begun.start(), len(text) - self._regexes.max_held_bytes))
        self._held_start = min(start, 1)
        self._seen = text[start - self._held_start :]
        self.held_len = len(self._seen[self._held_start :].decode())


def _is_inside_character(text: bytes, at: int) -> bool:
    return at < len(text) and text[at] & 0xC0 == 0x80


def _next_character(text: bytes, at: int) -> int:
    while _is_inside_character(text, at):
        at += 1
    return at


def make_regex_matcher(patterns: tuple[str, ...]) -> RegexMatcher | None:
    """A matcher of these stop regexes, None where there are none; InvalidParam if they do not compile."""
    return RegexMatcher(compile_stop_regexes(patterns)) if patterns else None
