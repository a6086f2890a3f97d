"""The output items of a response, whole and as the events in which they grow."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..chat.delta_blocks import Block, BlockKind, Change, Step

PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.TOOL_CALL: "fc"}
DELTA_EVENTS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.TOOL_CALL: "response.function_call_arguments",
}


def item(request_id: str, block: Block, status: str) -> dict[str, Any]:
    """A block as an output item; `status` is completed, incomplete or in_progress (then it is shown empty)."""
    part = [_part(block)] if block.text and status != "in_progress" else []
    shown = {"id": item_id(request_id, block), "status": status}
    match block.kind:
        case BlockKind.REASONING:
            return shown | {"type": "reasoning", "summary": [], "content": part}
        case BlockKind.TEXT:
            return shown | {"type": "message", "role": "assistant", "content": part}
        case BlockKind.TOOL_CALL:
            arguments = "" if status == "in_progress" else block.text
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return shown | {"type": "function_call"} | call


def item_id(request_id: str, block: Block) -> str:
    """The same in all events and in the response."""
    return f"{PREFIXES[block.kind]}_{request_id}_{block.index}"


class ItemEvents:
    """The events of a response's items; `encode` numbers each. `status` is that of the item which is done next."""

    def __init__(self, request_id: str, encode: Callable[[dict[str, Any]], bytes]) -> None:
        self.status = "completed"
        self._request_id = request_id
        self._encode = encode
        self._num_logprobs = 0  # of the open block that have been sent

    def of(self, change: Change) -> Iterator[bytes]:
        """The events that a change of a block makes."""
        step, block, text = change
        match step:
            case Step.STARTED:
                self._num_logprobs = 0
                yield self._item_event("response.output_item.added", block, "in_progress")
                yield from self._part_event("response.content_part.added", block, _empty_part(block.kind))
            case Step.GREW:
                start, self._num_logprobs = self._num_logprobs, len(block.logprobs)
                yield self._text_event("delta", block, {"delta": text}, block.logprobs[start:])
            case Step.DONE:
                yield self._text_event("done", block, _whole(block), block.logprobs)
                yield from self._part_event("response.content_part.done", block, _part(block))
                yield self._item_event("response.output_item.done", block, self.status)

    def _item_event(self, kind: str, block: Block, status: str) -> bytes:
        event = {"type": kind, "output_index": block.index, "item": item(self._request_id, block, status)}
        return self._encode(event)

    def _part_event(self, kind: str, block: Block, part: dict[str, Any]) -> Iterator[bytes]:
        if block.kind is not BlockKind.TOOL_CALL:
            yield self._encode({"type": kind} | self._place(block) | {"part": part})

    def _text_event(self, end: str, block: Block, fields: dict[str, Any], logprobs: Sequence[dict[str, Any]]) -> bytes:
        extra: dict[str, Any] = {"logprobs": logprobs} if block.kind is BlockKind.TEXT else {}
        return self._encode({"type": f"{DELTA_EVENTS[block.kind]}.{end}"} | self._place(block) | fields | extra)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": item_id(self._request_id, block), "output_index": block.index}
        return place if block.kind is BlockKind.TOOL_CALL else place | {"content_index": 0}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.TOOL_CALL:
        return {"name": block.name, "arguments": block.text}
    return {"text": block.text}


def _part(block: Block) -> dict[str, Any]:
    part = _empty_part(block.kind) | {"text": block.text}
    return part | {"logprobs": block.logprobs} if block.kind is BlockKind.TEXT else part


def _empty_part(kind: BlockKind) -> dict[str, Any]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
