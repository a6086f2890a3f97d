"""Log-probabilities of the tokens of an answer, each with the delta that the token's text is in."""

import codecs
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...common.tokenizer import Tokenizer
from .delta import Delta


class _Placed(NamedTuple):
    begin: int  # in characters of the text
    end: int
    entry: dict[str, Any]


class DeltaLogprobs:
    """Of one choice. `context_ids` are the tokens ahead of it; `hidden_ids` are in no text."""

    def __init__(self, tokenizer: Tokenizer, context_ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._last_ids = list(context_ids[-1:])
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0
        self._waiting: deque[_Placed] = deque()

    def add(self, token_ids: Sequence[int], entries: Sequence[dict[str, Any]]) -> None:
        """Take the entries of the next tokens, whose text may still be to come."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            begin = self._position
            if token_id not in self._hidden_ids:
                self._position += len(self._text_of(token_id))
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

    def _text_of(self, token_id: int) -> str:
        """What a token adds to the text, a character with the token that completes it."""
        if self._tokenizer.token_bytes is not None:
            return self._utf8.decode(self._tokenizer.token_bytes[token_id])
        before, self._last_ids = self._last_ids, [token_id]
        both = self._tokenizer.decode([*before, token_id], skip_special_tokens=False)
        return both[len(self._tokenizer.decode(before, skip_special_tokens=False)) :]
