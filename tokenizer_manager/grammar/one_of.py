"""oneOf as anyOf, where no value can match two of its branches: the compiler sees that only in simple cases."""

from collections.abc import Hashable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from .schema_limits import check_schema
from .schema_refs import find_target

MAX_REFERENCES = 32  # followed one after another
MAX_PAIRS = 50_000  # looked at in one schema
ALL_TYPES = frozenset({"null", "boolean", "string", "number", "object", "array"})


class Facts(NamedTuple):
    """What is easy to see of a schema: types, all values where it lists them, and what a matching object must have."""

    types: frozenset[str]
    values: frozenset[Hashable] | None
    required: dict[str, Any]


def with_any_of(schema: Any) -> Any:
    """A copy of the schema, with every oneOf that can be an anyOf written as one. SchemaError as of `check_schema`."""
    return _Rewriter(schema).rewrite(schema)


class _Rewriter:
    """For one schema, which `root` is: references begin there. The same schema always has the same outcome."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._schemas = {id(each) for _, each in check_schema(root)}
        self._facts: dict[int, Facts] = {}
        self._pairs_left = MAX_PAIRS

    def rewrite(self, schema: Any) -> Any:
        """This part of it."""
        if isinstance(schema, list):
            return [self.rewrite(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        new = {key: self.rewrite(value) for key, value in schema.items()}
        branches = schema.get("oneOf")
        if id(schema) in self._schemas and isinstance(branches, list) and "anyOf" not in schema:
            resolved = [_resolve(branch, self._root) for branch in branches]
            if all(self._are_apart(left, right) for left, right in combinations(resolved, 2)):
                new["anyOf"] = new.pop("oneOf")
        return new

    def _are_apart(self, left: Any, right: Any) -> bool:
        """Whether no value can match both: by themselves, or by something that objects of both must have."""
        left_to_see, seen = [(left, right)], {(id(left), id(right))}
        while left_to_see and self._pairs_left:
            self._pairs_left -= 1
            one, other = left_to_see.pop()
            if not isinstance(one, Mapping) or not isinstance(other, Mapping):
                if one is False or other is False:
                    return True
                continue
            facts, others = self._facts_of(one), self._facts_of(other)
            if _differ(facts, others):
                return True
            for name in facts.required:
                if name in others.required:
                    pair = (facts.required[name], others.required[name])
                    if (id(pair[0]), id(pair[1])) not in seen:
                        seen.add((id(pair[0]), id(pair[1])))
                        left_to_see.append(pair)
        return False

    def _facts_of(self, schema: Mapping[str, Any]) -> Facts:
        """They are collected once."""
        found = self._facts.get(id(schema))
        if found is None:
            types, required = _types(schema), _required(schema)
            found = Facts(types, _values(schema), {name: _resolve(each, self._root) for name, each in required})
            self._facts[id(schema)] = found
        return found


def _differ(left: Facts, right: Facts) -> bool:
    if left.types.isdisjoint(right.types):
        return True
    return left.values is not None and right.values is not None and left.values.isdisjoint(right.values)


def _resolve(schema: Any, root: Any) -> Any:
    """What a local reference stands for; another schema as it is."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        target = find_target(root, reference) if isinstance(reference, str) else None
        if target is None:
            return schema
        schema = target[1]
    return schema


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if given is None and (values := _listed(schema)) is not None:
        return frozenset(map(_type_of, values))
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    return frozenset("number" if name == "integer" else name for name in names) or ALL_TYPES


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _values(schema: Mapping[str, Any]) -> frozenset[Hashable] | None:
    values = _listed(schema)
    return None if values is None else frozenset(map(_frozen, values))


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that it allows, where it lists them."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return given if isinstance(given, list) else None


def _frozen(value: Any) -> Hashable:
    """Equal where JSON's values are: 1 is 1.0, and not true."""
    if isinstance(value, dict):
        return ("object", frozenset((key, _frozen(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", *map(_frozen, value))
    return (_type_of(value), value)


def _required(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Properties that a matching object has, and that say what they are; none where others than objects match."""
    required, properties = schema.get("required"), schema.get("properties")
    if _types(schema) != {"object"} or not isinstance(required, list) or not isinstance(properties, dict):
        return []
    return [(name, properties[name]) for name in required if isinstance(name, str) and name in properties]
