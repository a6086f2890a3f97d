"""JSON Schemas of many kinds, the same for a seed: what the packaged model's answers are held against."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "city", "colour", "size", "status", "owner", "email", "note", "code", "kind", "level", "title")


def schemas(num: int) -> list[tuple[str, Schema]]:
    """`num` schemas, each kind in turn, with the name of its kind."""
    kinds = list(KINDS.items())
    return [(kinds[i % len(kinds)][0], kinds[i % len(kinds)][1](random.Random(i))) for i in range(num)]


def words(draw: random.Random, num: int) -> list[str]:
    """Different names of properties."""
    return draw.sample(WORDS, num)


def record(properties: Schema, *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object with these properties alone."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def leaf(draw: random.Random) -> Schema:
    """Something without parts."""
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randint(5, 40)},
            {"type": "integer", "minimum": -10, "maximum": draw.randint(0, 10000)},
            {"type": "number", "minimum": 0, "maximum": 100},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": words(draw, 3)},
        ]
    )


def flat_record(draw: random.Random) -> Schema:
    """An object of leaves."""
    return record({name: leaf(draw) for name in words(draw, draw.randint(1, 6))})


def optional_properties(draw: random.Random) -> Schema:
    """An object, some properties of which may be missing."""
    names = words(draw, 5)
    return record({name: leaf(draw) for name in names}, optional=tuple(names[: draw.randint(1, 4)]))


def nested_record(draw: random.Random) -> Schema:
    """Objects in objects."""
    inner = flat_record(draw)
    for name in words(draw, draw.randint(1, 4)):
        inner = record({name: inner, "id": {"type": "integer", "minimum": 1, "maximum": 99}})
    return inner


def bounded_array(draw: random.Random) -> Schema:
    """A list of so many leaves."""
    low = draw.randint(0, 3)
    return {"type": "array", "items": leaf(draw), "minItems": low, "maxItems": low + draw.randint(1, 4)}


def array_of_records(draw: random.Random) -> Schema:
    """A list of small objects."""
    item = record({name: leaf(draw) for name in words(draw, 2)})
    return record({"rows": {"type": "array", "items": item, "minItems": 1, "maxItems": 3}})


def tuple_array(draw: random.Random) -> Schema:
    """A list whose places have types of their own."""
    items = [leaf(draw) for _ in range(draw.randint(2, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def enum_or_const(draw: random.Random) -> Schema:
    """Fixed values, strings and others."""
    values = [*words(draw, 2), draw.randint(0, 9), None, True, 2.5, 'a "quoted" one', "\u00e9\u4e16\n"]
    return record({"a": {"enum": draw.sample(values, 4)}, "b": {"const": draw.choice(values)}})


def patterned_string(draw: random.Random) -> Schema:
    """Strings that match a regex."""
    patterns = [
        "^[A-Z]{3}-[0-9]{4}$",
        "^(red|green|blue)$",
        "^\\d{1,3}(\\.\\d{1,3}){3}$",
        "^[a-z]+@[a-z]+\\.com$",
        "^x[0-9a-f]{2,8}$",
    ]
    return record({"a": {"type": "string", "pattern": draw.choice(patterns), "maxLength": 24}, "b": leaf(draw)})


def formatted_string(draw: random.Random) -> Schema:
    """Dates, addresses and the like."""
    formats = draw.sample(["date", "time", "date-time", "ipv4", "uuid"], 2)
    return record({name: {"type": "string", "format": name} for name in formats})


def ranged_number(draw: random.Random) -> Schema:
    """Numbers between bounds, open and closed."""
    low = draw.randint(-1000, 1000)
    return record(
        {
            "a": {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)},
            "b": {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1},
            "c": {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "minimum": 0, "maximum": 500},
        }
    )


def sized_string(draw: random.Random) -> Schema:
    """Strings of a length, in characters."""
    low = draw.randint(1, 10)
    return record(
        {"a": {"type": "string", "minLength": low, "maxLength": low + 10}, "b": {"type": "string", "maxLength": 5}}
    )


def any_of(draw: random.Random) -> Schema:
    """One of several forms."""
    return {"anyOf": [flat_record(draw), bounded_array(draw), {"type": "boolean"}]}


def one_of(draw: random.Random) -> Schema:
    """One of several forms that a constant tells apart."""
    forms = [record({"kind": {"const": name}, "value": leaf(draw)}) for name in words(draw, 3)]
    return record({"shape": {"oneOf": forms}})


def all_of(draw: random.Random) -> Schema:
    """Several things at once."""
    names = words(draw, 2)
    return {
        "allOf": [
            {"type": "object", "properties": {names[0]: leaf(draw)}, "required": [names[0]]},
            {"type": "object", "properties": {names[1]: leaf(draw)}, "required": [names[1]]},
        ],
        "properties": dict.fromkeys(names, True),
        "additionalProperties": False,
    }


def referred(draw: random.Random) -> Schema:
    """Definitions that are used twice."""
    definitions = {"point": record({"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": leaf(draw)})}
    reference = {"$ref": "#/$defs/point"}
    return {**record({"from": reference, "to": reference}), "$defs": definitions}


def recursive(draw: random.Random) -> Schema:
    """Nodes in nodes: a tree, or a chain. (Where each must say that it has no next one, a small model seldom does.)"""
    inner: Schema = {"$ref": "#/$defs/node"}
    if draw.random() < 0.5:
        inner = {"type": "array", "items": inner, "maxItems": 2}
    node = record({"value": leaf(draw), "next": inner}, optional=("next",))
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def nullable(draw: random.Random) -> Schema:
    """Several types in one place."""
    types = draw.choice([["string", "null"], ["integer", "boolean"], ["null", "boolean", "string"]])
    return record({name: {"type": types, "maxLength": 12, "minimum": 0, "maximum": 99} for name in words(draw, 3)})


def mapping(draw: random.Random) -> Schema:
    """Names of the model's own, with values of one form."""
    values = draw.choice([{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}])
    return {
        "type": "object",
        "patternProperties": {"^[a-z]{1,8}$": values},
        "additionalProperties": False,
        "maxProperties": 3,
    }


def awkward_names(draw: random.Random) -> Schema:
    """Property names with quotes, slashes, blanks and letters of other languages."""
    return record(
        {name: leaf(draw) for name in draw.sample(['a"b', "a/b", "a~b", "a b", "\u00fc", "\u4e16\u754c", "$ref"], 3)}
    )


def deep(draw: random.Random) -> Schema:
    """Lists in lists."""
    schema: Schema = leaf(draw)
    for _ in range(draw.randint(3, 8)):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return schema


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    each.__name__: each
    for each in (
        *(flat_record, optional_properties, nested_record, bounded_array, array_of_records, tuple_array),
        *(enum_or_const, patterned_string, formatted_string, ranged_number, sized_string, any_of, one_of, all_of),
        *(referred, recursive, nullable, mapping, awkward_names, deep),
    )
}
