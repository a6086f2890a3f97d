"""All that the grammar of a JSON Schema admits is valid, by any way in which bounds, names and patterns may meet."""

import json
import random
import warnings
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from millstream.tokenizer_manager.grammar.exact_schema import FORMATS
from tests.grammar.random_schemas import ByteGrammars, problems, random_schema

NUM_SCHEMAS = 250
GRAMMARS = ByteGrammars()
OPEN_ABOVE_ONE = {"type": "number", "exclusiveMinimum": 1}
BELOW_TWO = {"exclusiveMaximum": 1.5}
ANY_INTEGERS = {"additionalProperties": {"type": "integer"}}
INTEGERS = {"type": "object", **ANY_INTEGERS}
STANDARD_FORMATS = {"idn-email", "idn-hostname", "iri", "json-pointer", "regex", "uri-reference", "uri-template"}


def pattern(text: str) -> dict[str, str]:
    return {"type": "string", "pattern": text}


def kind(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"const": number}}, "required": ["k"]}


@pytest.mark.parametrize(
    ("schema", "valid", "wrong"),
    [
        ({"allOf": [OPEN_ABOVE_ONE, BELOW_TWO]}, 1.25, 1),
        ({**OPEN_ABOVE_ONE, "anyOf": [BELOW_TWO, {"type": "string"}]}, 1.25, 1),
        ({"$defs": {"x": OPEN_ABOVE_ONE}, "$ref": "#/$defs/x", **BELOW_TWO}, 1.25, 1),
        ({"constants": {"X": {**OPEN_ABOVE_ONE, **BELOW_TWO}}, "$ref": "#/constants/X"}, 1.25, 1),
        ({"type": "number", "exclusiveMinimum": 999999, "exclusiveMaximum": 999999.5}, 999999.25, 999999),
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
        ({"type": "object", "propertyNames": {"type": "string", "title": "x"}, **ANY_INTEGERS}, {"a": 1}, {"a": "x"}),
        ({"type": "object", "propertyNames": True, **ANY_INTEGERS}, {"a": 1}, {"a": "x"}),
        ({"components": {"schemas": {"enum": {"type": "null"}}}, "$ref": "#/components/schemas/enum"}, None, 1),
        (
            {"type": "object", "properties": {"enum": {"oneOf": [kind(1), kind(2)]}}},
            {"enum": {"k": 2}},
            {"enum": {"k": 3}},
        ),
        ({"type": "object", "properties": {"x": {"type": "string", "format": "password"}}}, {"x": "a"}, {"x": 1}),
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
        ({"const": {"a": {}}, "anyOf": [{"$ref": "#/const/a"}]}, "#/const/a: a reference to a value"),
        ({"items": {"type": "integer", "minimum": 2**53}}, "#/items/minimum: a number must be within"),
        ({"type": "integer", "minimum": -(2**70), "maximum": -(2**65)}, "#/maximum: a number must be within"),
        ({"items": {"exclusiveMinimum": 10**8, "maximum": 10**8 + 0.5}}, "#/items/exclusiveMinimum: beyond 1000000"),
        ({"type": "integer", "exclusiveMinimum": -(2**31), "maximum": 0.1 - 2**31}, "#/exclusiveMinimum: beyond"),
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
        (pattern("\\Aa"), "#/pattern: write ^ and $"),
        (pattern("a\\z"), "#/pattern: write ^ and $"),
        (
            {"patternProperties": {"^[\\d\\D]$": {"type": "integer"}, "^[\\w\\W]$": {"type": "string"}}},
            "#/patternProperties/^[\\w\\W]$: it matches the same",
        ),
        ({"properties": {"#x?y": {"not": {}}}}, "#/properties/#x?y: Unimplemented"),
        ({"propertyNames": {"pattern": "^a"}}, "#: Unimplemented"),
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
        ({"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 2**53}]}, "#/oneOf/1/minimum: a number"),
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
        {"properties": {"x": {"$ref": "#/$defs/List[\u00df]"}}, "$defs": {"List[\u00df]": {"type": "null"}}},
    ],
)
def test_references_as_libraries_write_them(schema: dict[str, Any]) -> None:
    assert GRAMMARS.admits({"type": "object", "additionalProperties": False, **schema}, {"x": None})
    assert not GRAMMARS.admits({"type": "object", "additionalProperties": False, **schema}, {"x": 1})


@pytest.mark.parametrize("name", sorted(FORMATS | STANDARD_FORMATS))
def test_formats_that_are_known_are_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    is_known = not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert (name in FORMATS) == is_known
    assert GRAMMARS.admits(schema, "?") != is_known


def test_what_is_wrong_in_a_wide_schema_is_found_at_once() -> None:
    names = {f"p{i}": {"type": "object", "properties": {"x": {"type": "string"}}} for i in range(600)}
    reason = GRAMMARS.matcher({"properties": {**names, "z": {"type": "array", "contains": {}}}})
    assert str(reason).startswith("#/properties/z: Unimplemented")
