"""How large a JSON Schema may be, and the subschemas in it, each under its JSON pointer."""

import json
from collections.abc import Iterator
from typing import Any

from .regex_limits import MAX_TEXT_CHARS, RegexError, check_regex

MAX_DEPTH = 32  # of schemas within schemas
MAX_NODES = 2000  # schemas, and entries of lists such as enum and required
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SINGLES = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")

Subschema = tuple[str, Any]  # pointer, schema


class SchemaError(ValueError):
    """The schema is refused; `pointer` says where (a URI fragment: "#" is the whole of it)."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer}: {message}")
        self.pointer = pointer


def check_schema(schema: Any) -> list[Subschema]:
    """All subschemas, each before those within it. SchemaError for a limit, or a regex that is too large."""
    found: list[Subschema] = []
    left: list[tuple[str, Any, int]] = [("#", schema, 1)]
    num_nodes = 0
    while left:
        pointer, each, depth = left.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
        if not isinstance(each, dict | bool):
            raise SchemaError(pointer, "a schema is an object")
        found.append((pointer, each))
        if isinstance(each, dict):
            num_nodes += 1 + sum(len(value) for value in each.values() if isinstance(value, list))
            if num_nodes > MAX_NODES:
                raise SchemaError(pointer, f"the schema has more than {MAX_NODES} subschemas and entries of lists")
            _check_own(pointer, each)
            left += [(f"{pointer}/{path}", value, depth + 1) for path, value in _inner(each)]
    return found


def _inner(schema: dict[str, Any]) -> Iterator[Subschema]:
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}/{_escape(key)}", value) for key, value in schema[name].items())
    for name in SINGLES:
        if isinstance(schema.get(name), dict):
            yield name, schema[name]
    for name in LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{index}", value) for index, value in enumerate(schema[name]))


def _check_own(pointer: str, schema: dict[str, Any]) -> None:
    for name in ("const", "enum", "properties"):
        texts = schema.get(name)
        for each in texts if isinstance(texts, list | dict) and name != "const" else [texts]:
            if len(json.dumps(each, ensure_ascii=False)) > MAX_TEXT_CHARS:
                raise SchemaError(f"{pointer}/{name}", f"a value has more than {MAX_TEXT_CHARS} characters")
    patterns = [("pattern", schema.get("pattern"))]
    if isinstance(schema.get("patternProperties"), dict):
        patterns += [(f"patternProperties/{_escape(key)}", key) for key in schema["patternProperties"]]
    for name, pattern in patterns:
        if isinstance(pattern, str):
            try:
                check_regex(pattern)
            except RegexError as error:
                raise SchemaError(f"{pointer}/{name}", str(error)) from None


def _escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
