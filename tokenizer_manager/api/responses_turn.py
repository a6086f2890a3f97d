"""From a body of OpenAI's Responses to a turn: items become the messages, tools and switches that templates read."""

from collections.abc import Sequence
from typing import Any

from ..api_error import bad_request, needed
from ..chat.chat_history import ChatHistory
from ..chat.chat_prompt import read_arguments, reasoning_switches
from ..chat.chat_service import ChatTurn
from ..grammar.grammar_messages import Grammar
from ..grammar.grammar_protocol import schema_grammar
from .responses_protocol import ContentPart, FunctionChoice, InputItem, ResponsesRequest, TextConfig
from .sampling_fields import SamplingBase

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def responses_turn(body: ResponsesRequest, base: SamplingBase, label: str | None) -> ChatTurn:
    """The turn that a body asks for; APIError naming what is wrong with it."""
    return ChatTurn(
        messages=_messages(body),
        sampling_params=body.sampling_params(base),
        stream=bool(body.stream),
        tools=_functions(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=_grammar(body.text),
        logprobs=body.logprobs,
        chat_template_kwargs=_template_kwargs(body),
        label=label,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


def ignored_tools(body: ResponsesRequest) -> list[str]:
    """One line for each tool that is not a function."""
    return [
        f"tools[{index}]: the type {tool.type[:100]} is not served here and was ignored"
        for index, tool in enumerate(body.tools or ())
        if tool.type != "function"
    ]


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    history = ChatHistory()
    if body.instructions:
        history.add_text("system", body.instructions)
    if isinstance(body.input, str):
        history.add_text("user", body.input)
    else:
        for index, item in enumerate(body.input):
            _add_item(history, item, f"input[{index}]")
    return history.messages


def _add_item(history: ChatHistory, item: InputItem, at: str) -> None:
    match item.type:
        case "message":
            history.add_text(needed(item.role, f"{at}.role"), _text(item.content, f"{at}.content"))
        case "function_call":
            call_id, name = needed(item.call_id, f"{at}.call_id"), needed(item.name, f"{at}.name")
            history.add_tool_call(call_id, name, read_arguments(item.arguments or ""))
        case "function_call_output":
            _add_output(history, item, at)
        case "reasoning":
            if item.content:
                history.add_reasoning(_text(item.content, f"{at}.content"))
        case _:
            message = f"{at}: an item of the type {item.type[:100]!r} is not supported"
            raise bad_request(message, f"{at}.type", "unsupported_content")


def _add_output(history: ChatHistory, item: InputItem, at: str) -> None:
    call_id = needed(item.call_id, f"{at}.call_id")
    try:
        history.add_tool_result(call_id, _text(item.output, f"{at}.output"))
    except KeyError:
        message = f"{at}.call_id: no function_call before it has the call_id {call_id[:100]!r}"
        raise bad_request(message, f"{at}.call_id") from None


def _text(content: str | Sequence[ContentPart] | None, at: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{at}[{index}]") for index, part in enumerate(needed(content, at)))


def _part(part: ContentPart, at: str) -> str:
    if part.type == "refusal":
        return str(needed(part.refusal, f"{at}.refusal"))
    if part.type not in TEXT_PARTS:
        message = f"{at}: a part of the type {part.type[:100]!r} is not supported; only texts are"
        raise bad_request(message, f"{at}.type", "unsupported_content")
    return str(needed(part.text, f"{at}.text"))


def _functions(body: ResponsesRequest) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type == "function":
            function = {
                "name": needed(tool.name, f"tools[{index}].name"),
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            given = {name: value for name, value in function.items() if value is not None}
            functions.append({"type": "function", "function": given})
    return functions


def _tool_choice(choice: str | FunctionChoice | None) -> str | dict[str, str]:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type != "function":
        message = f"tool_choice: the type {choice.type[:100]!r} is not supported; only function is"
        raise bad_request(message, "tool_choice.type", "unsupported_content")
    return {"name": needed(choice.name, "tool_choice.name")}


def _grammar(text: TextConfig | None) -> Grammar | None:
    given = text.format if text else None
    match given.type if given else "text":
        case "json_object":
            return schema_grammar({"type": "object"}, "text.format")
        case "json_schema":
            assert given is not None
            return schema_grammar(needed(given.schema, "text.format.schema"), "text.format.schema")
        case _:
            return None


def _template_kwargs(body: ResponsesRequest) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return reasoning_switches(effort) | (body.chat_template_kwargs or {})
