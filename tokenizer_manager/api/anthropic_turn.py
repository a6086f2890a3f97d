"""From a body of Anthropic's to a turn: blocks become the messages, tools and switches that chat templates read."""

from collections.abc import Iterator, Sequence
from typing import Any

from ...common.sampling_params import SamplingParams
from ..api_error import APIError, bad_request, needed
from ..chat.chat_history import ChatHistory
from ..chat.chat_service import ChatTurn
from ..grammar.grammar_messages import Grammar
from ..grammar.grammar_protocol import schema_grammar
from .anthropic_protocol import ContentBlock, PromptBody, ToolChoice

BILLING_HEADER = "x-anthropic-billing-header:"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def anthropic_turn(body: PromptBody, params: SamplingParams, **others: Any) -> ChatTurn:
    """The turn that a body asks for; APIError naming what is wrong with it. `others` are more fields of the turn."""
    history = ChatHistory()
    for text in _system_texts(body.system):
        history.add_text("system", text)
    for index, message in enumerate(body.messages):
        _add_message(history, message.role, message.content, f"messages[{index}].content")
    messages = history.messages
    if not messages:
        raise bad_request("messages hold nothing that can be answered", "messages")
    is_begun = messages[-1]["role"] == "assistant"
    if is_begun and "tool_calls" in messages[-1]:
        raise bad_request("messages: tool_use needs a tool_result in the next message", "messages")
    choice = body.tool_choice
    return ChatTurn(
        messages=messages,
        sampling_params=params,
        tools=_functions(body),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        grammar=_grammar(body),
        continue_final_message=is_begun,
        chat_template_kwargs={"enable_thinking": bool(body.thinking and body.thinking.type != "disabled")},
        **others,
    )


def ignored_tools(body: PromptBody) -> list[str]:
    """One line for each tool that is not served here."""
    return [
        f"tools[{index}]: the type {tool.type} is not served here and was ignored"
        for index, tool in enumerate(body.tools or ())
        if tool.type not in {None, "custom"}
    ]


def _system_texts(system: str | Sequence[ContentBlock] | None) -> Iterator[str]:
    """The system prompt, without a line at its head that differs in every request and would keep caches from it."""
    if system is None:
        return
    for index, text in enumerate([system] if isinstance(system, str) else _texts(system, "system")):
        kept = text
        if not index and text.startswith(BILLING_HEADER):
            kept = text.partition("\n")[2]
        if kept:
            yield kept


def _add_message(history: ChatHistory, role: str, content: str | list[ContentBlock], at: str) -> None:
    if isinstance(content, str):
        history.add_text(role, content)
        return
    if not content:
        raise bad_request(f"{at} must not be empty", at)
    for index, block in enumerate(content):
        _add_block(history, role, block, f"{at}[{index}]")


def _add_block(history: ChatHistory, role: str, block: ContentBlock, at: str) -> None:
    match role, block.type:
        case _, "text":
            history.add_text(role, needed(block.text, f"{at}.text"))
        case "assistant", "thinking":
            history.add_reasoning(needed(block.thinking, f"{at}.thinking"))
        case "assistant", "redacted_thinking":
            pass
        case "assistant", "tool_use":
            call_id, name = needed(block.id, f"{at}.id"), needed(block.name, f"{at}.name")
            history.add_tool_call(call_id, name, needed(block.input, f"{at}.input"))
        case "user", "tool_result":
            _add_tool_result(history, block, at)
        case _:
            raise _unknown_block(block, at, role)


def _add_tool_result(history: ChatHistory, block: ContentBlock, at: str) -> None:
    call_id, content = needed(block.tool_use_id, f"{at}.tool_use_id"), block.content
    text = content if isinstance(content, str) else "\n".join(_texts(content or (), f"{at}.content"))
    try:
        history.add_tool_result(call_id, text)
    except KeyError:
        message = f"{at}.tool_use_id: no tool_use before it has the id {call_id[:100]!r}"
        raise bad_request(message, f"{at}.tool_use_id") from None


def _texts(blocks: Sequence[ContentBlock], at: str) -> Iterator[str]:
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise _unknown_block(block, f"{at}[{index}]")
        yield needed(block.text, f"{at}[{index}].text")


def _unknown_block(block: ContentBlock, at: str, role: str | None = None) -> APIError:
    where = f" in a message of the role {role}" if role else ""
    message = f"{at}: a block of the type {block.type[:100]!r} is not supported{where}"
    return bad_request(message, f"{at}.type", "unsupported_content")


def _functions(body: PromptBody) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type in {None, "custom"}:
            schema = needed(tool.input_schema, f"tools[{index}].input_schema")
            function: dict[str, Any] = {"name": tool.name, "parameters": schema, "strict": tool.strict}
            if tool.description is not None:
                function["description"] = tool.description
            functions.append({"type": "function", "function": function})
    return functions


def _grammar(body: PromptBody) -> Grammar | None:
    form = body.output_config.format if body.output_config else None
    return schema_grammar(form.schema, "output_config.format.schema") if form else None


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, str]:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        return {"name": choice.name or ""}
    return TOOL_CHOICES[choice.type]
