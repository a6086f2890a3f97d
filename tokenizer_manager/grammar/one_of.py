"""oneOf as anyOf, where no value can match two of its branches: the compiler sees that only in simple cases."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

MAX_REFERENCES = 32  # followed one after another
ALL_TYPES = frozenset({"null", "boolean", "string", "number", "object", "array"})


def with_any_of(schema: Any, root: Any = None) -> Any:
    """The same schema, with every oneOf that can be an anyOf written as one. `root` is what references begin at."""
    root = schema if root is None else root
    if isinstance(schema, list):
        return [with_any_of(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: value if key in ("enum", "const") else with_any_of(value, root) for key, value in schema.items()}
    branches = schema.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in schema:
        resolved = [_resolve(branch, root) for branch in branches]
        if all(_are_apart(left, right, root) for left, right in combinations(resolved, 2)):
            new["anyOf"] = new.pop("oneOf")
    return new


def _are_apart(left: Any, right: Any, root: Any) -> bool:
    """Whether no value can match both, as far as this is easy to see."""
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return left is False or right is False
    if _types(left).isdisjoint(_types(right)):
        return True
    values, others = _values(left), _values(right)
    if values is not None and others is not None and not any(value in others for value in values):
        return True
    return any(
        _are_apart(_resolve(left["properties"][name], root), _resolve(right["properties"][name], root), root)
        for name in _required(left) & _required(right)
    )


def _resolve(schema: Any, root: Any) -> Any:
    """What a local reference stands for; another schema as it is."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                return schema
            found = found[key]
        schema = found
    return schema


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given, values = schema.get("type"), _values(schema)
    if given is None and values is not None:
        return frozenset(kind for kind, _ in values)
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    return frozenset("number" if name == "integer" else name for name in names) or ALL_TYPES


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _values(schema: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    """All values that it allows, where it lists them; True is not 1 here."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return [(_type_of(value), value) for value in given] if isinstance(given, list) else None


def _required(schema: Mapping[str, Any]) -> set[str]:
    """Properties that a matching object has, and that say what they are; none where others than objects match."""
    required, properties = schema.get("required"), schema.get("properties")
    if _types(schema) != {"object"} or not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}
