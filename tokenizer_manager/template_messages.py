"""What the template pool and its child process say to each other: length-prefixed msgpack frames, strictly in turn.

pool -> child   RenderSetup             once
child -> pool   RenderReply             once: ready, or why the template is no use
pool -> child   RenderRequest           for each chat
child -> pool   RenderReply             its answer
"""

from typing import Any

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**28


class RenderSetup(msgspec.Struct, frozen=True):
    """The model's templates by name, its special tokens by role, and the limits of one render."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    render_seconds: float
    memory_bytes: int
    max_output_chars: int


class RenderRequest(msgspec.Struct, frozen=True):
    """One chat; all of it is data."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


class RenderReply(msgspec.Struct, frozen=True):
    """The rendered text, or why there is none."""

    text: str = ""
    error: str | None = None


def to_frame(message: RenderSetup | RenderRequest | RenderReply) -> bytes:
    """A message as it goes through the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
