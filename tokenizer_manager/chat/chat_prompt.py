"""From the messages of a chat to the text of its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ..api_error import bad_request, unsupported
from ..sandbox.template_pool import TemplateError

MAX_MESSAGES = 1024


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; only text is understood."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Which function was called; `arguments` is a JSON object, as a text or as it is."""

    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn. `reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRenderer(Protocol):
    """What turns messages into a prompt."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt; TemplateError for what the template refuses."""


def reasoning_switches(effort: str | None) -> dict[str, Any]:
    """OpenAI's reasoning effort as chat templates take it."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


async def render_chat(
    renderer: ChatRenderer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
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
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
    except TemplateError as error:
        raise bad_request(str(error), error.param, "chat_template_error") from None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them; APIError names what is wrong."""
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _check(messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool) -> None:
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise bad_request(f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}", "messages")
    if continue_final_message and messages[-1]["role"] != "assistant":
        message = "continue_final_message needs a last message of the role assistant"
        raise bad_request(message, "continue_final_message")


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as chat templates read it: its content is one string, and arguments of calls are objects."""
    at, content = f"messages[{index}]", message.content
    if message.function_call is not None:
        raise unsupported(f"{at}.function_call", f"{at}.function_call is not supported; use tool_calls")
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{at}.tool_calls: only the assistant calls tools", f"{at}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise bad_request(f"{at}.tool_call_id is required", f"{at}.tool_call_id", "missing_field")
    if content is None and not message.tool_calls:
        raise bad_request(f"{at}.content is required", f"{at}.content", "missing_field")
    if not isinstance(content, str):
        content = "\n".join(_text_of(part, index) for part in content or ())
    extras = {
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [_template_call(call) for call in message.tool_calls or ()] or None,
        "tool_call_id": message.tool_call_id if message.role == "tool" else None,
    }
    return {"role": message.role, "content": content} | {k: v for k, v in extras.items() if v is not None}


def _template_call(call: MessageToolCall) -> dict[str, Any]:
    arguments = read_arguments(call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def read_arguments(given: str | dict[str, Any]) -> Any:
    """Arguments as an object; those that are no JSON object (an answer was cut off, say) stay the text that they are."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return given


def _text_of(part: ContentPart, index: int) -> str:
    param = f"messages[{index}].content"
    if part.type != "text":
        raise bad_request(f"{param}: only parts of the type text are supported", param, "unsupported_content")
    if part.text is None:
        raise bad_request(f"{param}: a part of the type text needs a text", param, "missing_field")
    return part.text
