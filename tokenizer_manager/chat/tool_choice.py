"""What a client says of its tools, checked: the tools themselves, and which of them may or must be called."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..api_error import bad_request

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

ToolChoice = str | Mapping[str, str]


def check_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> None:
    """APIError naming the tool, or the choice, that is wrong; `tools` are as chat templates read them."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools holds at most {MAX_TOOLS} tools, not {len(tools)}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at, function = f"tools[{index}]", tool["function"]
        name = function["name"]
        if not TOOL_NAME.fullmatch(name):
            message = f"{at}.function.name must be 1 to 128 characters of A-Z a-z 0-9 . _ -, not {name[:150]!r}"
            raise bad_request(message, f"{at}.function.name")
        if name in names:
            raise bad_request(f"{at}.function.name: {name!r} is the name of another tool too", f"{at}.function.name")
        names.add(name)
        _check_parameters(function.get("parameters") or {}, f"{at}.function.parameters")
    _check_choice(names, choice)


def callable_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> Sequence[dict[str, Any]]:
    """The tools that the answer may call."""
    if choice == "none":
        return ()
    if isinstance(choice, str):
        return tools
    return [tool for tool in tools if tool["function"]["name"] == choice["name"]]


def is_forced(choice: ToolChoice) -> bool:
    """Whether the answer must be a call."""
    return choice == "required" or not isinstance(choice, str)


def _check_choice(names: set[str], choice: ToolChoice) -> None:
    if not isinstance(choice, str):
        if choice["name"] not in names:
            message = f"tool_choice: tools has no function with the name {choice['name'][:150]!r}"
            raise bad_request(message, "tool_choice")
    elif choice not in ("none", "auto", "required"):
        message = "tool_choice must be none, auto, required, or a function of tools"
        raise bad_request(message, "tool_choice")
    elif choice == "required" and not names:
        raise bad_request("tool_choice: required needs tools", "tool_choice")


def _check_parameters(schema: Mapping[str, Any], at: str) -> None:
    """The outermost object's types; what a grammar needs beyond them is checked where one is made."""
    kind = schema.get("type", "object")
    if kind not in ("object", ["object"]):
        raise bad_request(f"{at}.type must be object", at)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise bad_request(f"{at}.properties must be an object", at)
    for name, value in properties.items():
        if isinstance(value, dict) and not _is_type(value.get("type", "string")):
            message = f"{at}.properties: the type of {name[:100]!r} must be one of {', '.join(sorted(SCHEMA_TYPES))}"
            raise bad_request(message, at)


def _is_type(kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    return all(isinstance(each, str) and each in SCHEMA_TYPES for each in kinds)
