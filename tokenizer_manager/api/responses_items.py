"""The output items of a response, whole and as the events in which they grow."""

from collections.abc import Callable, Iterator
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
    text = "" if status == "in_progress" else block.text
    shown = {"id": item_id(request_id, block), "status": status}
    match block.kind:
        case BlockKind.REASONING:
            return shown | {"type": "reasoning", "summary": [], "content": [_part(block.kind, text)] if text else []}
        case BlockKind.TEXT:
            return shown | {
                "type": "message",
                "role": "assistant",
                "content": [_part(block.kind, text)] if text else [],
            }
        case BlockKind.TOOL_CALL:
            return shown | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}


def item_id(request_id: str, block: Block) -> str:
    """The same in all events and in the response."""
    return f"{PREFIXES[block.kind]}_{request_id}_{block.index}"


class ItemEvents:
    """The events of a response's items; `encode` numbers each. `status` is that of the item which is done next."""

    def __init__(self, request_id: str, encode: Callable[[dict[str, Any]], bytes]) -> None:
        self.status = "completed"
        self._request_id = request_id
        self._encode = encode

    def of(self, change: Change) -> Iterator[bytes]:
        """The events that a change of a block makes."""
        step, block, text = change
        match step:
            case Step.STARTED:
                yield self._item_event("response.output_item.added", block, "in_progress")
                yield from self._part_event("response.content_part.added", block, "")
            case Step.GREW:
                yield self._text_event("delta", block, {"delta": text})
            case Step.DONE:
                yield self._text_event("done", block, _whole(block))
                yield from self._part_event("response.content_part.done", block, block.text)
                yield self._item_event("response.output_item.done", block, self.status)

    def _item_event(self, kind: str, block: Block, status: str) -> bytes:
        event = {"type": kind, "output_index": block.index, "item": item(self._request_id, block, status)}
        return self._encode(event)

    def _part_event(self, kind: str, block: Block, text: str) -> Iterator[bytes]:
        if block.kind is not BlockKind.TOOL_CALL:
            yield self._encode({"type": kind} | self._place(block) | {"part": _part(block.kind, text)})

    def _text_event(self, end: str, block: Block, fields: dict[str, Any]) -> bytes:
        extra: dict[str, Any] = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        return self._encode({"type": f"{DELTA_EVENTS[block.kind]}.{end}"} | self._place(block) | fields | extra)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": item_id(self._request_id, block), "output_index": block.index}
        return place if block.kind is BlockKind.TOOL_CALL else place | {"content_index": 0}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.TOOL_CALL:
        return {"name": block.name, "arguments": block.text}
    return {"text": block.text}


def _part(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
