"""The grammars of tool calls, as a model's family writes them: calls that are forced, and calls inside free text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...common.tokenizer import Tokenizer
from ..chat.tool_format import ToolFormat
from .grammar_messages import Grammar
from .lark import ANY_TEXT, lark_schema, lark_text, schema_text

MAX_CALLS = 16  # in one answer
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS = {"type": "object"}


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    layout: ToolFormat,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    parallel: bool = True,
    answer: Grammar | None = None,
) -> Grammar:
    """One call, or several where they may be parallel, of any of the tools, or of the one of this name.

    `tools` are as chat templates read them. An `answer`, which is a JSON Schema, may stand in the calls' place.
    """
    special_tokens = _special_tokens(tokenizer, layout)
    schemas, calls = [], []
    for index, tool in enumerate(tools):
        if name is None or tool["function"]["name"] == name:
            schemas.append(_schema(index, tool["function"]))
            calls.append(_call(len(schemas) - 1, tool["function"], layout, special_tokens))
    more = f" ({lark_text(layout.separator, special_tokens)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    begin, end = lark_text(layout.begin, special_tokens), lark_text(layout.end, special_tokens)
    lines = [f"calls: {begin} call{more} {end}", _any_of("call", calls)]
    if answer is None:
        lines.insert(0, "start: calls")
    else:
        schemas.append((answer.param, answer.text))
        lines[:0] = ["start: calls | answer", f"answer: {lark_schema(len(schemas) - 1)}"]
    return Grammar("lark", "\n".join(lines), "tools", tuple(schemas))


def strict_tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    layout: ToolFormat,
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    reasoning_tags: Iterable[str] = (),
) -> Grammar:
    """Free text in which calls, which begin with the layout's opening, are those of the tools. One alone ends the answer.

    The arguments of tools with "strict" follow their schema, those of others are any object. `reasoning_tags` that are
    special tokens may stand ahead of the calls.
    """
    special_tokens = _special_tokens(tokenizer, layout)
    functions = [tool["function"] for tool in tools]
    schemas = [_schema(index, function, is_free=not function.get("strict")) for index, function in enumerate(functions)]
    tags = [f"text <[{token_id}]>" for token_id in _ids(tokenizer, reasoning_tags)]
    opens_each = layout.before_name.startswith(layout.opening)
    rest = layout
    if opens_each:
        rest = msgspec.structs.replace(layout, before_name=layout.before_name.removeprefix(layout.opening))
    lines = [
        f"start: {'reasoning* ' if tags else ''}{'calls* text' if parallel else '(calls | text)'}",
        _one_call(layout, special_tokens) if opens_each else _several_calls(layout, special_tokens, parallel=parallel),
        f"text: {ANY_TEXT}",
        _head(layout, special_tokens),
        _any_of("call", [_call(index, function, rest, special_tokens) for index, function in enumerate(functions)]),
    ]
    return Grammar(
        "lark", "\n".join([*lines, *([_any_of("reasoning", tags)] if tags else [])]), "tools", tuple(schemas)
    )


def _one_call(layout: ToolFormat, special_tokens: Mapping[str, int]) -> str:
    """Where each call has an opening; what stands around all calls is text, or a token that may be there."""
    begin, end = lark_text(layout.begin, special_tokens), lark_text(layout.end, special_tokens)
    before = f"(text {begin})? " if layout.begin in special_tokens else ""
    return f"calls: {before}head call{f' ({end})?' if end else ''}"


def _several_calls(layout: ToolFormat, special_tokens: Mapping[str, int], *, parallel: bool) -> str:
    """Where all calls together have one opening."""
    begin = lark_text(layout.begin.removeprefix(layout.opening), special_tokens)
    separator, end = lark_text(layout.separator, special_tokens), lark_text(layout.end, special_tokens)
    return f"calls: head {begin} call{f' ({separator} call){{0,{MAX_CALLS - 1}}}' if parallel else ''} {end}"


def _head(layout: ToolFormat, special_tokens: Mapping[str, int]) -> str:
    """Free text up to the opening, which it can not hold."""
    opening = lark_text(layout.opening, special_tokens)
    return f"head: text {opening}" if layout.opening in special_tokens else f"head[lazy]: {ANY_TEXT} {opening}"


def _schema(index: int, function: Mapping[str, Any], *, is_free: bool = False) -> tuple[str, str]:
    """The arguments' schema, and the field that brought it."""
    at = f"tools[{index}].function.parameters"
    return at, schema_text(ANY_PARAMETERS if is_free else _closed(function.get("parameters") or NO_PARAMETERS), at)


def _call(schema_index: int, function: Mapping[str, Any], layout: ToolFormat, special_tokens: Mapping[str, int]) -> str:
    before = lark_text(layout.before_name + function["name"] + layout.after_name, special_tokens)
    return f"{before} {lark_schema(schema_index)} {lark_text(layout.after_arguments, special_tokens)}"


def _any_of(name: str, bodies: Iterable[str]) -> str:
    return f"{name}: " + "\n    | ".join(bodies)


def _ids(tokenizer: Tokenizer, tags: Iterable[str]) -> list[int]:
    """Of those tags that are special tokens."""
    found = map(tokenizer.token_to_id, tags)
    return [token_id for token_id in found if token_id is not None and token_id in tokenizer.special_token_ids]


def _special_tokens(tokenizer: Tokenizer, layout: ToolFormat) -> dict[str, int]:
    """Those that the layout holds, with their ids."""
    layout_text = "\n".join(msgspec.structs.astuple(layout))
    return {text: token_id for text, token_id in tokenizer.special_texts.items() if text and text in layout_text}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """No arguments but those that the tool names, unless it says that there may be others."""
    closing = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closing, **schema}
