"""oneOf as anyOf: only where no value matches two branches, always with the same outcome, and in bounded time."""

import time
from itertools import permutations
from typing import Any

import jsonschema
import pytest

from millstream.tokenizer_manager.grammar.one_of import with_any_of

Schema = dict[str, Any]


def record(kind: Any, **properties: Any) -> Schema:
    """An object that says what it is, all of its properties required."""
    properties = {"kind": {"const": kind}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


def is_any_of(*branches: Any, **definitions: Any) -> bool:
    found = with_any_of({"oneOf": list(branches), "$defs": definitions})
    assert ("anyOf" in found) != ("oneOf" in found)
    return "anyOf" in found


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize("names", list(permutations(["kind", "next", "prev"])))
def test_lists_that_name_themselves_are_apart_in_whatever_order_they_are_written(names: tuple[str, ...]) -> None:
    lists = {}
    for name in "AB":
        whole = record(name, next=ref(name), prev=ref(name))
        lists[name] = {
            **whole,
            "required": list(names),
            "properties": {each: whole["properties"][each] for each in names},
        }
    assert is_any_of(ref("A"), ref("B"), **lists)


def test_lists_that_differ_in_nothing_are_not_apart() -> None:
    lists = {name: record("same", next=ref(name), other=ref(other)) for name, other in ("AB", "BA")}
    assert not is_any_of(ref("A"), ref("B"), **lists)


def test_branches_that_share_all_their_parts_cost_each_pair_once() -> None:
    names = [f"p{i}" for i in range(12)]
    definitions = {}
    for side in "AB":
        for depth in range(12):
            inner = ref(f"{side}{depth + 1}") if depth < 11 else {"type": "string"}
            definitions[f"{side}{depth}"] = record("same", **dict.fromkeys(names, inner))
    start = time.monotonic()
    assert not is_any_of(ref("A0"), ref("B0"), **definitions)
    assert time.monotonic() - start < 1


def test_many_branches_end_in_time() -> None:
    start = time.monotonic()
    assert is_any_of(*[record(i) for i in range(200)])
    assert not is_any_of(*[record(i) for i in range(400)])
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("left", "right", "value"),
    [
        ({"const": 1}, {"const": 1.0}, 1),
        ({"enum": [{"a": [1]}]}, {"const": {"a": [1.0]}}, {"a": [1]}),
        ({"type": "integer"}, {"type": "number"}, 3),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, "b"),
        (record("a"), {"type": ["object", "null"]}, {"kind": "a"}),
        ({"properties": {"kind": {"const": 1}}, "required": ["kind"]}, record(2), None),
        (record("a"), {"type": "object", "properties": {"kind": {}}}, {"kind": "a"}),
        (True, {"type": "string"}, "x"),
    ],
)
def test_what_one_value_may_match_twice_stays_one_of(left: Any, right: Any, value: Any) -> None:
    assert not is_any_of(left, right)
    if value is not None:
        assert jsonschema.Draft202012Validator({"allOf": [left, right] if left is not True else [right]}).is_valid(
            value
        )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"const": 1}, {"const": True}),
        ({"const": [1]}, {"const": [True]}),
        ({"const": {"a": 1}}, {"enum": [{"a": 2}, "a"]}),
        ({"type": "null"}, {"type": ["integer", "string"]}),
        (False, {"type": "string"}),
        (record("a"), record("b")),
        (record("a", x=record("c")), record("a", x=record("d"))),
    ],
)
def test_what_no_value_matches_twice_is_any_of(left: Any, right: Any) -> None:
    assert is_any_of(left, right)
