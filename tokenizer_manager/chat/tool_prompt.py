"""Tools for models whose chat template knows none: shown in a system message, and spoken of in plain text, as Hermes
does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .tool_format import ToolFormat

SHOW_TOOLS = """You may call functions to help the user. They are described as JSON within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object in this way:
{example}"""


def show_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], layout: ToolFormat
) -> list[dict[str, Any]]:
    """The messages with a system message that shows the tools, and how they are called."""
    example = layout.write_all([("function-name", '{"argument-name": "value"}')])
    shown = SHOW_TOOLS.format(tools="\n".join(_json(tool) for tool in tools), example=example)
    if messages and messages[0]["role"] == "system":
        first, others = messages[0], messages[1:]
        return [{**first, "content": f"{first['content']}\n\n{shown}"}, *map(dict, others)]
    return [{"role": "system", "content": shown}, *map(dict, messages)]


def write_calls(messages: Sequence[Mapping[str, Any]], layout: ToolFormat) -> list[dict[str, Any]]:
    """The messages with tool calls as text of the assistant, and what tools answered as text of the user."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            written.append(_write_call(message, layout))
            continue
        response = f"<tool_response>\n{message['content']}\n</tool_response>"
        if written and written[-1].get("answers_calls"):
            written[-1]["content"] += f"\n{response}"
        else:
            written.append({"role": "user", "content": response, "answers_calls": True})
    return [{key: value for key, value in message.items() if key != "answers_calls"} for message in written]


def _write_call(message: Mapping[str, Any], layout: ToolFormat) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    functions = [call["function"] for call in message.get("tool_calls", ())]
    if functions:
        calls = layout.write_all([(function["name"], _arguments(function["arguments"])) for function in functions])
        plain["content"] = "\n".join(filter(None, [message["content"], calls]))
    return plain


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else _json(given)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
