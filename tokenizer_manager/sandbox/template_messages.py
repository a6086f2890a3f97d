"""What the template pool and its child process say to each other, as child_frames.py has it."""

from typing import Any

import msgspec

from .child_frames import ChildReply, ChildSetup


class RenderSetup(ChildSetup, frozen=True):
    """The model's templates by name, its special tokens by role, and the limits of one render."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    max_output_chars: int


class RenderRequest(msgspec.Struct, frozen=True):
    """One chat; all of it is data."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


class RenderReply(ChildReply, frozen=True):
    """The rendered text, or why there is none."""

    text: str = ""
