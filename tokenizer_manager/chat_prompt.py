"""From the messages of a chat to the text of its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from .api_error import bad_request, unsupported
from .template_pool import TemplateError

MAX_MESSAGES = 1024


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class ChatRenderer(Protocol):
    """What turns messages into a prompt."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt; TemplateError for what the template refuses."""


async def render_chat(
    renderer: ChatRenderer | None,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> str:
    """The prompt of a chat; APIError naming what is wrong with it. `renderer` is None where chat is not served."""
    _check(messages, continue_final_message=continue_final_message)
    if renderer is None:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages", "chat_template_error")
    try:
        return await renderer.render(
            [_template_message(index, message) for index, message in enumerate(messages)],
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
    except TemplateError as error:
        raise bad_request(str(error), error.param, "chat_template_error") from None


def _check(messages: Sequence[ChatMessage], *, continue_final_message: bool) -> None:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise bad_request(f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}", "messages")
    if continue_final_message and messages[-1].role != "assistant":
        message = "continue_final_message needs a last message of the role assistant"
        raise bad_request(message, "continue_final_message")


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it: its content is one string."""
    if message.tool_calls:
        raise unsupported(f"messages[{index}].tool_calls")
    content = message.content
    if content is None:
        raise bad_request(f"messages[{index}].content is required", f"messages[{index}].content", "missing_field")
    if not isinstance(content, str):
        content = "\n".join(_text_of(part, index) for part in content)
    extras = {"name": message.name, "reasoning_content": message.reasoning_content}
    return {"role": message.role, "content": content} | {k: v for k, v in extras.items() if v is not None}


def _text_of(part: ContentPart, index: int) -> str:
    param = f"messages[{index}].content"
    if part.type != "text":
        raise bad_request(f"{param}: only parts of the type text are supported", param, "unsupported_content")
    if part.text is None:
        raise bad_request(f"{param}: a part of the type text needs a text", param, "missing_field")
    return part.text
