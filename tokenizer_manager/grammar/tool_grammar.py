"""The grammar that makes a model answer with tool calls, as its family writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...common.tokenizer import Tokenizer
from ..chat.tool_format import ToolFormat
from .grammar_messages import Grammar
from .lark import lark_schema, lark_text, schema_text

MAX_CALLS = 16  # in one answer
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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
    calls, schemas = [], []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if name is None or function["name"] == name:
            parameters = _closed(function.get("parameters") or NO_PARAMETERS)
            at = f"tools[{index}].function.parameters"
            schemas.append((at, schema_text(parameters, at)))
            before = lark_text(layout.before_name + function["name"] + layout.after_name, special_tokens)
            calls.append(
                f"{before} {lark_schema(len(schemas) - 1)} {lark_text(layout.after_arguments, special_tokens)}"
            )
    more = f" ({lark_text(layout.separator, special_tokens)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    begin, end = lark_text(layout.begin, special_tokens), lark_text(layout.end, special_tokens)
    lines = [f"calls: {begin} call{more} {end}", "call: " + "\n    | ".join(calls)]
    if answer is None:
        lines.insert(0, "start: calls")
    else:
        schemas.append((answer.param, answer.text))
        lines[:0] = ["start: calls | answer", f"answer: {lark_schema(len(schemas) - 1)}"]
    return Grammar("lark", "\n".join(lines), "tools", tuple(schemas))


def _special_tokens(tokenizer: Tokenizer, layout: ToolFormat) -> dict[str, int]:
    """Those that the layout holds, with their ids."""
    layout_text = "\n".join(msgspec.structs.astuple(layout))
    texts = {
        tokenizer.decode([token_id], skip_special_tokens=False): token_id for token_id in tokenizer.special_token_ids
    }
    return {text: token_id for text, token_id in texts.items() if text and text in layout_text}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """No arguments but those that the tool names, unless it says that there may be others."""
    closing = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closing, **schema}
