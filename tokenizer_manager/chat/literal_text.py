"""Special tokens that stand in a client's message are text: it can not end its turn there, nor begin another's.

Before a chat is rendered, each of them gets a MARK, with which the tokenizer does not know it. Where a client sends one
it is dropped.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import re2

from ...common.literal_mark import MARK


class LiteralText:
    """Made for the special tokens of one tokenizer."""

    def __init__(self, special_texts: Iterable[str]) -> None:
        texts = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._pattern = re2.compile("|".join(map(re2.escape, texts))) if texts else None  # linear in the text

    def mark(self, value: Any) -> Any:
        """The same messages, tools or arguments, with marks in all their special tokens."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        text = text.replace(MARK, "")
        while self._pattern is not None and self._pattern.search(text):  # again, since tokens may overlap
            text = self._pattern.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", text)
        return text
