"""JSON Schemas as llguidance has to read them, so that all it admits is valid.

It takes some things for more than they allow: a key that comes twice counts twice; a whole number that is excluded as a
bound is taken where the other bound is less than one away; bounds are floats; fractions of which binary has no exact
multiples; patterns, of which `schema_pattern` tells. What can be is written in another way, the rest is refused. It
refuses what says nothing: formats that it does not know, propertyNames that any name follows. These are dropped. Bounds
and multiples meet when schemas are merged (allOf, $ref, anyOf), so those of the whole schema are looked at together.
"""

import math
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

from .regex_limits import RegexError
from .schema_limits import SchemaError, check_schema
from .schema_pattern import exact_pattern
from .schema_refs import escape

BOUND_STEP = 1e-9  # between an excluded whole number and the bound that stands for it
MAX_MOVED = 10**6  # beyond which BOUND_STEP gets lost
MAX_BOUND = 2**53 - 1  # beyond which a float does not hold every whole number
OUT_OF_BOUNDS = f"a number must be within {MAX_BOUND} of 0"
MAX_MULTIPLE = 100_000  # as many remainders are told apart
MAX_MULTIPLES = 2**32  # of several that are merged, in thousandths
THOUSANDTHS = 1000  # which a smaller multiple may be made of
FORMATS = frozenset(  # that it keeps; others are annotations
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
MINIMA, MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

Places = list[tuple[str, dict[str, Any]]]  # JSON pointers and schemas


def make_exact(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed in place."""
    places = [(pointer, each) for pointer, each in check_schema(schema) if isinstance(each, dict)]
    for pointer, each in places:
        _drop_annotations(each)
        _quote_reference(each)
        _check_min_properties(pointer, each)
        _limit_bounds(pointer, each)
        _check_values(pointer, each)
        _rewrite_patterns(pointer, each)
    _check_multiples(places)
    while _move_bounds(places):
        pass  # what has moved may have come near others
    return schema


def _drop_annotations(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    names = schema.get("propertyNames")
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS} if isinstance(names, dict) else names
    if said is True or said in ({}, {"type": "string"}):
        del schema["propertyNames"]


def _quote_reference(schema: dict[str, Any]) -> None:
    """A URI, which has no other characters; the places are found already."""
    if isinstance(schema.get("$ref"), str):
        base, sign, pointer = schema["$ref"].partition("#")
        schema["$ref"] = base + sign + quote(unquote(pointer), safe="/$~")


def _check_min_properties(pointer: str, schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    num_required = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if _is_number(least) and least > max(1, num_required):
        raise SchemaError(f"{pointer}/minProperties", "more than 1 is taken only where as many are required")


def _limit_bounds(pointer: str, schema: dict[str, Any]) -> None:
    """Within MAX_BOUND: a bound beyond it on the far side allows less, one on the near side would allow more."""
    for keys, sign in ((MINIMA, 1), (MAXIMA, -1)):
        for key in keys:
            if _is_number(schema.get(key)):
                if sign * schema[key] > MAX_BOUND:
                    raise SchemaError(f"{pointer}/{key}", OUT_OF_BOUNDS)
                schema[key] = sign * max(sign * schema[key], -MAX_BOUND)


def _check_values(pointer: str, schema: dict[str, Any]) -> None:
    """Numbers that are listed become bounds."""
    for name in ("const", "enum"):
        left = [schema.get(name)]
        while left:
            value = left.pop()
            left += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
            if _is_number(value) and abs(value) > MAX_BOUND:
                raise SchemaError(f"{pointer}/{name}", OUT_OF_BOUNDS)


def _check_multiples(places: Places) -> None:
    multiples = {pointer: schema["multipleOf"] for pointer, schema in places if _is_number(schema.get("multipleOf"))}
    for pointer, multiple in multiples.items():
        is_fraction = multiple % 1 > 0
        largest = MAX_MULTIPLE / THOUSANDTHS if is_fraction else MAX_MULTIPLE
        if not 0 < multiple <= largest or round(multiple, 3) != multiple:
            message = (
                f"must be a whole number up to {MAX_MULTIPLE}, or up to 100 with at most three digits behind the point"
            )
            raise SchemaError(f"{pointer}/multipleOf", message)
    thousandths = {round(multiple * THOUSANDTHS) for multiple in multiples.values()}
    if len(thousandths) > 1 and math.lcm(*thousandths) * max(thousandths) >= MAX_MULTIPLES:
        raise SchemaError("#", "the values of multipleOf are too large together")


def _rewrite_patterns(pointer: str, schema: dict[str, Any]) -> None:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _pattern(f"{pointer}/pattern", schema["pattern"])
    named = schema.get("patternProperties")
    if isinstance(named, dict):
        at = f"{pointer}/patternProperties"
        schema["patternProperties"] = exact = dict[str, Any]()
        for key, value in named.items():
            pattern = _pattern(f"{at}/{escape(key)}", key)
            if pattern in exact:
                raise SchemaError(f"{at}/{escape(key)}", "it matches the same names as one before it")
            exact[pattern] = value


def _pattern(pointer: str, pattern: str) -> str:
    try:
        return exact_pattern(pattern)
    except RegexError as error:
        raise SchemaError(pointer, str(error)) from None


def _move_bounds(places: Places) -> bool:
    """An excluded whole number gives way where the other bound may come within one of it, wherever that one stands.

    Not elsewhere: from 5.999999999 as a maximum, llguidance would ask for nine digits after "5.9". Whether any has moved.
    """
    has_moved = False
    for keys, (excluded, included), sign in (
        (MAXIMA, ("exclusiveMinimum", "minimum"), 1),
        (MINIMA, ("exclusiveMaximum", "maximum"), -1),
    ):
        others = [sign * bound for _, schema in places for bound in map(schema.get, keys) if _is_number(bound)]
        near = {math.floor(other) for other in others if other != int(other)}
        for pointer, schema in places:
            bound = schema.get(excluded)
            if _is_number(bound) and sign * bound in near:
                if abs(bound) > MAX_MOVED:
                    raise SchemaError(f"{pointer}/{excluded}", f"beyond {MAX_MOVED}, the other bound must be one away")
                del schema[excluded]
                has_moved = True
                moved = sign * bound + BOUND_STEP
                own = schema.get(included)
                schema[included] = sign * (max(moved, sign * own) if _is_number(own) else moved)
    return has_moved


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
