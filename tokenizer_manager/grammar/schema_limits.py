"""How large a JSON Schema may be, and the subschemas in it, each under its JSON pointer."""

import json
from collections.abc import Iterator
from typing import Any

from .regex_limits import MAX_TEXT_CHARS, RegexError, check_regex
from .schema_refs import escape, find_target, has_own_base

MAX_DEPTH = 32  # of schemas within schemas
MAX_SHOWN = 100  # characters of a wrong reference
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
    """The schema is refused; `pointer` says where (a URI fragment: "#" is the whole of it), `message` what is wrong."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(f"{pointer}: {message}")
        self.pointer, self.message = pointer, message


def check_schema(schema: Any) -> list[Subschema]:
    """All subschemas, each before those within it. SchemaError for a limit, a wrong `$ref`, or a regex that is too large."""
    found: dict[str, Any] = {}
    left: list[tuple[str, Any, int]] = [("#", schema, 1)]
    targets: list[Subschema] = []  # of references; most are found before they are looked at
    num_nodes = 0
    while left or targets:
        if not left:
            pointer, each = targets.pop()
            left = [] if pointer in found else [(pointer, each, 1)]
            continue
        pointer, each, depth = left.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(pointer, f"schemas are nested more than {MAX_DEPTH} deep")
        if not isinstance(each, dict | bool):
            raise SchemaError(pointer, "a schema is an object")
        found[pointer] = each
        if isinstance(each, dict):
            num_nodes += 1 + sum(len(value) for value in each.values() if isinstance(value, list))
            if num_nodes > MAX_NODES:
                raise SchemaError(pointer, f"the schema has more than {MAX_NODES} subschemas and entries of lists")
            _check_own(pointer, each)
            if "$ref" in each:
                targets.append(_target(schema, pointer, each["$ref"]))
            left += [(f"{pointer}/{path}", value, depth + 1) for path, value in inner_schemas(each)]
    _check_values(found)
    _check_bases(found)
    return list(found.items())


def _target(root: Any, pointer: str, reference: Any) -> Subschema:
    target = find_target(root, reference) if isinstance(reference, str) else None
    if target is None:
        what = f"{reference[:MAX_SHOWN]!a} does not exist; " if isinstance(reference, str) else ""
        raise SchemaError(f"{pointer}/$ref", f'{what}a reference is "#", or "#/" and a place in this schema')
    return target


def _check_values(found: dict[str, Any]) -> None:
    """No schema, which may be one because it is referred to, is (part of) a value that is to be compared with."""
    for pointer in found:
        parts = pointer.split("/")
        ends = [end for end, part in enumerate(parts) if part in ("const", "enum")]
        if any("/".join(parts[:end]) in found for end in ends):  # there it is a keyword, and no name
            raise SchemaError(pointer, "a reference to a value is not taken")


def _check_bases(found: dict[str, Any]) -> None:
    """References begin at the root where no other place has a name of its own."""
    places = [(pointer, each) for pointer, each in found.items() if isinstance(each, dict)]
    named = next((pointer for pointer, each in places if pointer != "#" and has_own_base(each, found["#"])), None)
    if named is not None and any("$ref" in each for _, each in places):
        raise SchemaError(named, "$id within a schema is not taken beside $ref")


def inner_schemas(schema: dict[str, Any]) -> Iterator[Subschema]:
    """The schemas right within one, each under the part of a JSON pointer that leads to it."""
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}/{escape(key)}", value) for key, value in schema[name].items())
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
        patterns += [(f"patternProperties/{escape(key)}", key) for key in schema["patternProperties"]]
    for name, pattern in patterns:
        if isinstance(pattern, str):
            try:
                check_regex(pattern)
            except RegexError as error:
                raise SchemaError(f"{pointer}/{name}", str(error)) from None
