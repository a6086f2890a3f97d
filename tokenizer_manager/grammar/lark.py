"""Pieces of Lark as llguidance reads it, for grammars that we write ourselves."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..api_error import bad_request
from .exact_schema import make_exact
from .one_of import with_any_of

ANY_TEXT = "/(.|\\n)*/"  # but no special tokens
JSON_OPTIONS = {
    "whitespace_pattern": "[ \n]?",  # at most one between two tokens of JSON
    "json_allowed_escapes": 'nrbtf\\"',  # with u a property's name could be written so that it is not known for it
}


def lark_text(text: str, special_tokens: Mapping[str, int] | None = None) -> str:
    """Exactly this text, in which these special tokens (and their ids) are meant as such; "" for no text."""
    pieces = [text]
    if special_tokens:
        longest_first = sorted(special_tokens, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    texts = (
        _quoted(piece) if index % 2 == 0 else f"<[{(special_tokens or {})[piece]}]>"
        for index, piece in enumerate(pieces)
    )
    return " ".join(filter(None, texts))


def lark_schema(index: int) -> str:
    """A value that follows the JSON Schema of this index in Grammar.schemas."""
    return f"@schema_{index}"


def lark_grammar(text: str, schemas: Iterable[Any] = ()) -> str:
    """llguidance's grammar of a Lark text, with the JSON Schemas that it names."""
    named = [{"name": lark_schema(i)[1:], "json_schema": schema_to_compile(each)} for i, each in enumerate(schemas)]
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": text}, *named]})


def schema_text(schema: Any, param: str) -> str:
    """A JSON Schema as Grammar holds it; APIError where it is nested too deeply."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise bad_request(f"{param} is nested too deeply", param, "invalid_schema") from None


def schema_to_compile(schema: Any) -> dict[str, Any]:
    """A JSON Schema as llguidance is to read it: our white space, anyOf for oneOf where that is the same, and no more
    admitted than is valid. SchemaError where it can not be had.
    """
    own = with_any_of(schema)
    return {**(make_exact(own) if isinstance(own, dict) else {"allOf": [own]}), "x-guidance": JSON_OPTIONS}


def lark_regex(pattern: str) -> str:
    """A text that a regex matches in full."""
    escaped, is_escaped = [], False
    for character in pattern:
        escaped.append("\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character)
        is_escaped = character == "\\" and not is_escaped
    return f"/{''.join(escaped)}/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
