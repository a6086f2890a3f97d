"""One answer as blocks in a row: reasoning, text, tool calls. Anthropic's content blocks and the output items of
OpenAI's Responses are two ways of writing them.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from .delta import Delta, ToolCallDelta


class BlockKind(Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


class Block:
    """One block, open or done; `call_id` and `name` are those of a tool call, whose text is its arguments."""

    def __init__(self, index: int, kind: BlockKind, call: ToolCallDelta | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_index = call.index if call else -1
        self.call_id = (call.id if call else None) or ""
        self.name = (call.name if call else None) or ""
        self.is_done = False
        self.logprobs: list[dict[str, Any]] = []  # of a text, where they are asked for
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that it holds so far."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Put some more behind it."""
        self._pieces.append(text)


class Step(Enum):
    """What has happened to a block."""

    STARTED = 0
    GREW = 1
    DONE = 2


Change = tuple[Step, Block, str]  # the text is what a block grew by


class DeltaBlocks:
    """Cuts the deltas of one choice into blocks: at most one is open, and an empty piece opens none.

    A text has the log-probabilities of its content's deltas.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, deltas: Sequence[Delta]) -> list[Change]:
        """What some more deltas change, in order. The blocks do not depend on how the deltas were cut."""
        return [change for delta in deltas for change in self._add(delta)]

    def finish(self) -> list[Change]:
        """The answer has ended, and so has its last block."""
        return list(self._close())

    def _add(self, delta: Delta) -> Iterator[Change]:
        if delta.reasoning:
            yield from self._grow(BlockKind.REASONING, delta.reasoning)
        if delta.content:
            yield from self._grow(BlockKind.TEXT, delta.content, logprobs=delta.logprobs or ())
        for call in delta.tool_calls:
            yield from self._grow(BlockKind.TOOL_CALL, call.arguments, call)

    def _close(self) -> Iterator[Change]:
        if self.blocks and not self.blocks[-1].is_done:
            block = self.blocks[-1]
            block.is_done = True
            yield Step.DONE, block, ""

    def _grow(
        self, kind: BlockKind, text: str, call: ToolCallDelta | None = None, logprobs: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Change]:
        call_index = call.index if call else -1
        block = self.blocks[-1] if self.blocks else None
        if block is None or (block.kind, block.call_index) != (kind, call_index):
            yield from self._close()
            block = Block(len(self.blocks), kind, call)
            self.blocks.append(block)
            yield Step.STARTED, block, ""
        block.logprobs += logprobs
        if text:
            block.add(text)
            yield Step.GREW, block, text
