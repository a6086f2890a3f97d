"""All that the grammar of a JSON Schema admits is valid, by any way in which bounds, names and patterns may meet."""

import random
import warnings
from typing import Any

import jsonschema
import pytest

from tests.grammar.random_schemas import ByteGrammars, problems, random_schema

NUM_SCHEMAS = 250
GRAMMARS = ByteGrammars()
OPEN_ABOVE_ONE = {"type": "number", "exclusiveMinimum": 1}
BELOW_TWO = {"exclusiveMaximum": 1.5}
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}


def pattern(text: str) -> dict[str, str]:
    return {"type": "string", "pattern": text}


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"allOf": [OPEN_ABOVE_ONE, BELOW_TWO]}, 1.25, 1),
        ({**OPEN_ABOVE_ONE, "anyOf": [BELOW_TWO, {"type": "string"}]}, 1.25, 1),
        ({"$defs": {"x": OPEN_ABOVE_ONE}, "$ref": "#/$defs/x", **BELOW_TWO}, 1.25, 1),
        ({"constants": {"X": {**OPEN_ABOVE_ONE, **BELOW_TWO}}, "$ref": "#/constants/X"}, 1.25, 1),
        ({"type": "number", "exclusiveMinimum": 1000001, "exclusiveMaximum": 1000001.5}, 1000001.25, 1000001),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, -1.25, -1),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, -0.25, b"-0"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "anyOf": [{"minimum": 0.5}, {"type": "number"}]}, 0.25, 0),
        ({"type": "integer", "maximum": 2**53 + 1}, 5, 2**53 + 2),
        ({"type": "integer", "minimum": -(2**70), "maximum": 3}, -5, 4),
        ({"type": "number", "multipleOf": 0.25}, 1.75, 1.3),
        (pattern('^[^"]+$'), "a\\", 'a"'),
        (pattern("^[^]\\\\]+$"), 'a"', "a\\"),
        (pattern("^[^-\\\\]+$"), ",", "\\"),
        (pattern("^\\W$"), "-", "\u00e9"),
        (pattern("^[\\D]$"), "\u00e9", "\u0663"),
        (pattern("^[^\\w]$"), "-", "\u00e9"),
        (pattern("^[\\w\\W]$"), "\u00e9", "ab"),
        ({"type": "object", "patternProperties": {'^[^"]$': True}, "additionalProperties": False}, {"a": 1}, {'"': 1}),
    ],
)
def test_what_is_admitted_is_valid(schema: dict[str, Any], valid: Any, wrong: Any) -> None:
    assert GRAMMARS.admits(schema, valid)
    assert jsonschema.Draft202012Validator(schema).is_valid(valid)
    assert not GRAMMARS.admits(schema, wrong)


@pytest.mark.parametrize("value", [5.9, 5, 0.1])
def test_a_bound_that_is_far_from_the_other_stays_as_it_is(value: float) -> None:
    assert GRAMMARS.admits({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 6}, value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"components": {"X": {**INTEGERS, "minProperties": 2}}, "$ref": "#/components/X"}, "#/components/X/minProp"),
        ({"components": {"X": pattern("a{2000}")}, "$ref": "#/components/X"}, "#/components/X/pattern: a regex must"),
        ({"items": {"$ref": "#/nowhere"}}, "#/items/$ref: '#/nowhere' does not exist"),
        ({"$defs": {"x": {"$anchor": "x"}}, "$ref": "#x"}, "#/$ref: '#x' does not exist"),
        ({"$defs": {"x": {"$id": "urn:x", "$ref": "#/$defs/y"}, "y": True}}, "#/$defs/x: $id within"),
        ({"a": {"const": {}}, "$ref": "#/a/const"}, "#/a/const: a reference to a value"),
        ({"items": {"type": "integer", "minimum": 2**53}}, "#/items/minimum: a number must be within"),
        ({"type": "integer", "minimum": -(2**70), "maximum": -(2**65)}, "#/maximum: a number must be within"),
        ({"const": [{"a": 2**53 + 1}]}, "#/const: a number must be within 9007199254740991 of 0"),
        ({"type": "integer", "enum": [1, -1e308]}, "#/enum: a number must be within"),
        ({"items": {"multipleOf": 0.0001}}, "#/items/multipleOf: must be a whole number up to 100000, or up to 100"),
        ({"items": {"multipleOf": 1e308}}, "#/items/multipleOf: must be a whole number up to 100000, or up to 100"),
        ({"items": {"type": "integer", "multipleOf": 2**24}}, "#/items/multipleOf: must be a whole number up to"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "#: the values of multipleOf are too large"),
        (pattern("^[[:alpha:]]$"), "#/pattern: within a class"),
        (pattern("^[a-z&&[^b]]$"), "#/pattern: within a class"),
        (pattern("[a-z--b]"), "#/pattern: within a class"),
        (pattern("(?x) a"), "#/pattern: of groups"),
        (pattern("a(?i)b"), "#/pattern: of groups"),
        (pattern("a++"), "#/pattern: a quantifier"),
        (pattern("\\x{41}"), "#/pattern: write \\x{41}"),
        (pattern("[\\x00-!#-~]"), "#/pattern: the class"),
        ({"properties": {"children": {"items": {"$ref": "#"}}, "x": {"not": {}}}}, "#/properties/x: Unimplemented"),
        ({"properties": {"a": True, "b": {"$ref": "#/properties/a"}, "x": {"not": {}}}}, "#/properties/x: Unimpl"),
        ({"items": {"$ref": "#/$defs/N"}, "$defs": {"N": {"items": {"not": {}}}}}, "#/$defs/N/items: Unimpl"),
        (
            {"items": {"$ref": "#/$defs/N"}, "$defs": {"N": {"type": "x", "items": {"$ref": "#/$defs/N"}}}},
            "#/$defs/N: Inv",
        ),
        ({"oneOf": [{"const": 1}, {"type": "null", "not": {}}]}, "#/oneOf/1: Unimplemented"),
    ],
)
def test_what_can_not_be_exact_is_refused_by_its_place(schema: dict[str, Any], message: str) -> None:
    reason = GRAMMARS.matcher(schema)
    assert isinstance(reason, str), schema
    assert reason.startswith(message)


def test_random_texts_of_random_schemas_are_valid() -> None:
    """`make test-grammar` looks at more."""
    num_texts, found = 0, []
    with warnings.catch_warnings(action="ignore"):
        for index in range(NUM_SCHEMAS):
            draw = random.Random(index)
            num, bad = problems(GRAMMARS, random_schema(draw), draw)
            num_texts, found = num_texts + num, found + bad
    assert found == []
    assert num_texts > NUM_SCHEMAS


def test_multiples_of_decimals_are_exact() -> None:
    cents = {"type": "number", "multipleOf": 0.01}
    assert [text for text in (b"0.29", b"19.99", b"-3", b"0.295", b"0.001") if GRAMMARS.admits(cents, text)] == [
        b"0.29",
        b"19.99",
        b"-3",
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#/$defs/A"}}, "required": ["x"], "$defs": {"A": {"id": "A", "type": "null"}}},
        {"$id": "T0", "properties": {"x": {"anyOf": [{"$ref": "T0"}, {"type": "null"}]}}, "required": ["x"]},
        {"$id": "urn:t", "properties": {"x": {"$ref": "urn:t#/$defs/A"}}, "$defs": {"A": {"type": "null"}}},
    ],
)
def test_references_as_libraries_write_them(schema: dict[str, Any]) -> None:
    assert GRAMMARS.admits({"type": "object", "additionalProperties": False, **schema}, {"x": None})
    assert not GRAMMARS.admits({"type": "object", "additionalProperties": False, **schema}, {"x": 1})
