"""Log-probabilities as clients read them: OpenAI's two shapes and SGLang's lists.

Tokens stand as texts and, where the shape has room, as bytes: a token that is a part of a character has its own bytes,
and U+FFFD in its text. Where the model failed there is no log-probability: null, or UNLIKELY where a number must stand.
"""

import codecs
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ...common.logprobs import LogprobReq, TokenLogprobs
from ...common.tokenizer import Tokenizer

UNLIKELY = -9999.0  # OpenAI's number for what is all but impossible
MANY_LOGPROBS = 10_000  # are written in a thread: the event loop has other things to do meanwhile


class TokenEntry(NamedTuple):
    """One token's: its own, those of the likeliest tokens (falling), those that were asked for."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    asked: list[float]


def entries(token_ids: Sequence[int], logprobs: TokenLogprobs) -> Iterator[TokenEntry]:
    """The columns, token by token."""
    own, top, asked = (
        _floats(column) for column in (logprobs.logprobs, logprobs.top_logprobs, logprobs.asked_logprobs)
    )
    top_ids = array("i", logprobs.top_ids)
    num_top, num_asked = (len(column) // max(len(own), 1) for column in (top, asked))
    for i, (token_id, logprob) in enumerate(zip(token_ids, own, strict=True)):
        pairs = zip(top_ids[i * num_top : (i + 1) * num_top], top[i * num_top : (i + 1) * num_top], strict=True)
        best = [pair for pair in pairs if pair[0] >= 0]
        yield TokenEntry(token_id, logprob, best, list(asked[i * num_asked : (i + 1) * num_asked]))


def chat_entries(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    """The `content` of OpenAI's chat log-probabilities."""
    return [
        _chat_entry(tokenizer, entry.token_id, entry.logprob)
        | {"top_logprobs": [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in entry.top]}
        for entry in entries(token_ids, logprobs)
    ]


class CompletionLogprobs:
    """The `logprobs` of OpenAI's text completions, of one choice: call it in the order of the tokens.

    `text_offset` is where a token's text begins in the choice's text, in characters; a token that goes on with a
    character begins where that one does. Tokens of `hidden_ids` are in no text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None, text: str) -> dict[str, Any]:
        """Of an echoed prompt, whose first token has none."""
        start = _CompletionColumns()
        shown_ids = self._hidden_ids
        self._hidden_ids = frozenset() if text.startswith(self._text_of(token_ids[0])) else frozenset(token_ids[:1])
        self._add(start, TokenEntry(token_ids[0], math.nan, [], []))
        self._hidden_ids = frozenset()
        for entry in entries(token_ids[1:], logprobs) if logprobs is not None else ():
            self._add(start, entry)
        self._hidden_ids = shown_ids
        self._offset = len(text)
        return start.to_json()

    def outputs(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> dict[str, Any]:
        """Of the next output tokens."""
        columns = _CompletionColumns()
        for entry in entries(token_ids, logprobs) if logprobs is not None else ():
            self._add(columns, entry)
        return columns.to_json()

    def _add(self, columns: "_CompletionColumns", entry: TokenEntry) -> None:
        text = self._text_of(entry.token_id)
        best: dict[str, float] = {}
        for token_id, logprob in entry.top:
            best.setdefault(self._text_of(token_id), number(logprob))
        if math.isnan(entry.logprob):
            columns.add(text, None, None, self._offset)
        else:
            best.setdefault(text, number(entry.logprob))
            columns.add(text, number(entry.logprob), best, self._offset)
        if entry.token_id not in self._hidden_ids:
            self._offset += len(self._utf8.decode(self._tokenizer.bytes_of(entry.token_id)))

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.bytes_of(token_id).decode(errors="replace")


class _CompletionColumns:
    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []

    def add(self, text: str, logprob: float | None, best: dict[str, float] | None, offset: int) -> None:
        self._tokens.append(text)
        self._token_logprobs.append(logprob)
        self._top_logprobs.append(best)
        self._text_offset.append(offset)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._text_offset,
        }


class GenerateLogprobs:
    """The lists of SGLang's meta_info, of one request: all since `clear`, and each item is encoded once.

    An item is [log-probability, token id, text], where the text is null unless `with_texts`.
    """

    def __init__(
        self, tokenizer: Tokenizer, wanted: LogprobReq, prompt_ids: Sequence[int], *, with_texts: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted.resolved(len(prompt_ids))
        self._prompt_ids = prompt_ids
        self._with_texts = with_texts
        self._is_first = True
        self._lists = {name: bytearray() for name in self._names("input") + self._names("output")}

    def add(
        self, token_ids: Sequence[int], logprobs: TokenLogprobs | None, prompt_logprobs: TokenLogprobs | None
    ) -> None:
        """Take those of some more tokens, and once those of the prompt."""
        start = self._wanted.start_len
        if prompt_logprobs is not None or (start == len(self._prompt_ids) - 1 and self._is_first):
            self._append("input", [self._items([(self._prompt_ids[start], math.nan)])[0], None, None])
        if prompt_logprobs is not None:
            for entry in entries(self._prompt_ids[start + 1 :], prompt_logprobs):
                self._append_entry("input", entry)
        self._is_first = False
        for entry in entries(token_ids, logprobs) if logprobs is not None else ():
            self._append_entry("output", entry)

    def to_json(self) -> dict[str, msgspec.Raw]:
        """The lists by name."""
        return {name: msgspec.Raw(b"[" + items[1:] + b"]") for name, items in self._lists.items()}

    def clear(self) -> None:
        """Forget what has been handed out."""
        for items in self._lists.values():
            items.clear()

    @property
    def num_bytes(self) -> int:
        """What `to_json` will take."""
        return sum(map(len, self._lists.values()))

    def _names(self, side: str) -> list[str]:
        names = [f"{side}_token_logprobs"]
        names += [f"{side}_top_logprobs"] if self._wanted.num_top else []
        return names + ([f"{side}_token_ids_logprobs"] if self._wanted.token_ids else [])

    def _append_entry(self, side: str, entry: TokenEntry) -> None:
        asked = list(zip(self._wanted.token_ids, entry.asked, strict=True))
        own = self._items([(entry.token_id, entry.logprob)])[0]
        self._append(side, [own, self._items(entry.top), self._items(asked)])

    def _append(self, side: str, values: list[Any]) -> None:
        kinds = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
        for kind, value in zip(kinds, values, strict=True):
            items = self._lists.get(f"{side}_{kind}")
            if items is not None:
                items += b"," + msgspec.json.encode(value)

    def _items(self, pairs: Sequence[tuple[int, float]]) -> list[list[Any]]:
        return [
            [None if math.isnan(logprob) else number(logprob), token_id, self._text_of(token_id)]
            for token_id, logprob in pairs
        ]

    def _text_of(self, token_id: int) -> str | None:
        return self._tokenizer.bytes_of(token_id).decode(errors="replace") if self._with_texts else None


def number(logprob: float) -> float:
    """What JSON has a number for."""
    return max(logprob, UNLIKELY) if not math.isnan(logprob) else UNLIKELY


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.bytes_of(token_id)
    return {"token": token.decode(errors="replace"), "logprob": number(logprob), "bytes": list(token)}


def _floats(column: bytes) -> "array[float]":
    return array("f", column)
