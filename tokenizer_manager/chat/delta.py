"""What a chat's answer is made of, piece by piece: all the deltas of a choice add up to its message."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call: the first has `id` and `name`, and all `arguments` together are one JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """Some content, some reasoning, some of the tool calls.

    `end` is how far the text had been read for it, in characters; content stood right ahead of there. `logprobs` are
    OpenAI's entries of the tokens up to there; with content, of those that its text was in.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    end: int = 0
    logprobs: Sequence[dict[str, Any]] | None = None


class OutputParser(Protocol):
    """From the text of one choice to its deltas. How the text is cut into feeds changes how the deltas are cut, no more."""

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Where in the text so far reasoning stands, its tags included: [start, end) in characters."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that some more text makes; what is not decided yet is held back."""

    def finish(self) -> list[Delta]:
        """The text has ended: what was held back."""


class PlainParser:
    """All text is content."""

    reasoning_spans = ()

    def __init__(self) -> None:
        self._end = 0

    def feed(self, text: str) -> list[Delta]:
        """See OutputParser."""
        self._end += len(text)
        return [Delta(content=text, end=self._end)] if text else []

    def finish(self) -> list[Delta]:
        """See OutputParser."""
        return []


class ToolCall(msgspec.Struct):
    """One whole tool call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


class ChatMessageSum:
    """What the deltas of one choice have added up to."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []
        self._calls: list[ToolCall] = []
        self.logprobs: list[dict[str, Any]] | None = None

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take some more."""
        for delta in deltas:
            self._content.append(delta.content)
            self._reasoning.append(delta.reasoning)
            for call in delta.tool_calls:
                self._add_call(call)
            if delta.logprobs is not None:
                self.logprobs = self.logprobs or []
                self.logprobs += delta.logprobs

    @property
    def content(self) -> str:
        """All content."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the order of their indexes."""
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(pieces)
        return self._calls

    def _add_call(self, piece: ToolCallDelta) -> None:
        if piece.index == len(self._calls):
            self._calls.append(ToolCall(piece.id or "", piece.name or "", ""))
            self._arguments.append([])
        self._arguments[piece.index].append(piece.arguments)
