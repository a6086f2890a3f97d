"""Where a parser puts what it has read: deltas, as few as hold it."""

import secrets
from collections.abc import Callable
from typing import Literal

from .delta import Delta, ToolCallDelta

MAX_CALLS = 128  # in one answer

ContentPlace = Literal["anywhere", "ahead", "nowhere"]


def new_call_id() -> str:
    """An id of a tool call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """An id of a tool call that Mistral's templates take: nine characters."""
    return secrets.token_hex(5)[:9]


class DeltaWriter:
    """Collects deltas until they are taken; calls beyond `max_calls` are dropped.

    `content_goes` anywhere, ahead of calls alone, or nowhere: what looks so there is the beginning of a call that was cut off.

    `position` tells how far the text has been read: a piece of content is written when all behind it is still to be read.
    """

    def __init__(
        self,
        position: Callable[[], int],
        *,
        new_id: Callable[[], str] = new_call_id,
        max_calls: int = MAX_CALLS,
        content_goes: ContentPlace = "anywhere",
    ) -> None:
        self.num_calls = 0
        self._position = position
        self._max_calls = max_calls
        self._content_goes = content_goes
        self._new_id = new_id
        self._deltas: list[Delta] = []

    def content(self, text: str) -> None:
        """Some content."""
        is_beginning = self._content_goes == "nowhere" or (self._content_goes == "ahead" and self.num_calls > 0)
        if text and not is_beginning:
            self._deltas.append(Delta(content=text, end=self._position()))

    def reasoning(self, text: str) -> None:
        """Some reasoning."""
        if text:
            self._deltas.append(Delta(reasoning=text, end=self._position()))

    def begin_call(self, name: str) -> None:
        """A tool call begins."""
        if self.num_calls < self._max_calls:
            self._add_call(ToolCallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Some of the arguments of the last call."""
        if text and self.num_calls <= self._max_calls:
            self._add_call(ToolCallDelta(self.num_calls - 1, arguments=text))

    def take(self) -> list[Delta]:
        """What was written since the last call, pieces of one kind joined."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) < 2:
            return deltas
        joined: list[list[Delta]] = []
        for delta in deltas:
            if joined and _continues(joined[-1][-1], delta):
                joined[-1].append(delta)
            else:
                joined.append([delta])
        return [_join(run) for run in joined]

    def _add_call(self, piece: ToolCallDelta) -> None:
        self._deltas.append(Delta(tool_calls=(piece,), end=self._position()))


NewWriter = Callable[[Callable[[], int]], DeltaWriter]  # of one that is told the position


def _continues(last: Delta, delta: Delta) -> bool:
    if delta.tool_calls:
        return bool(last.tool_calls) and last.tool_calls[0].index == delta.tool_calls[0].index
    if delta.content:
        return bool(last.content) and last.end == delta.end - len(delta.content)
    return bool(last.reasoning)


def _join(run: list[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    content, reasoning = ("".join([getattr(delta, name) for delta in run]) for name in ("content", "reasoning"))
    if not run[0].tool_calls:
        return Delta(content=content, reasoning=reasoning, end=run[-1].end)
    first = run[0].tool_calls[0]
    arguments = "".join([delta.tool_calls[0].arguments for delta in run])
    return Delta(tool_calls=(ToolCallDelta(first.index, first.id, first.name, arguments),), end=run[-1].end)
