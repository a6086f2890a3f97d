"""Log-probabilities of the tokens of an answer, each with the delta that the token's text is in."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...common.incremental_decoder import IncrementalDecoder
from .delta import Delta


class _Placed(NamedTuple):
    begin: int  # in characters of the text
    end: int
    entry: dict[str, Any]


class DeltaLogprobs:
    """Of one choice. The decoder gives the text of its tokens, as the choice's own text came about."""

    def __init__(self, decoder: IncrementalDecoder) -> None:
        self._decoder = decoder
        self._position = 0
        self._waiting: deque[_Placed] = deque()

    def add(self, token_ids: Sequence[int], entries: Sequence[dict[str, Any]]) -> None:
        """Take the entries of the next tokens, whose text may still be to come."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            begin = self._position
            self._position += len(self._decoder.feed(token_id))
            self._waiting.append(_Placed(begin, max(self._position, begin + 1), entry))

    def place(self, deltas: Sequence[Delta], *, is_last: bool) -> list[Delta]:
        """The deltas, each with the entries of the tokens that begin ahead of its end.

        Entries of tokens whose text is in no content come with none; `is_last`: so do all that are left.
        """
        placed = []
        for delta in deltas:
            if delta.content and (others := self._take(ends_by=delta.end - len(delta.content))):
                placed.append(Delta(logprobs=others))
            entries = self._take(ahead_of=delta.end)
            placed.append(msgspec.structs.replace(delta, logprobs=entries or None))
        if is_last and self._waiting:
            placed.append(Delta(logprobs=self._take()))
        return placed

    def _take(self, *, ahead_of: float = math.inf, ends_by: float = math.inf) -> list[dict[str, Any]]:
        """The entries of the next tokens, as long as they begin ahead of one place and end by the other."""
        taken = []
        while self._waiting and self._waiting[0].begin < ahead_of and self._waiting[0].end <= ends_by:
            taken.append(self._waiting.popleft().entry)
        return taken
