"""JSON Schemas as llguidance has to read them, so that all it admits is valid.

It takes two things for more than they allow: a key that comes twice counts twice, and a whole number that is excluded as
a bound is taken where the other bound is less than one away. The first is refused, the second written in another way.
"""

from typing import Any

from .schema_limits import SchemaError, check_schema

BOUND_STEP = 1e-9  # between an excluded whole number and the bound that stands for it
MAX_BOUND = 1e6  # beyond which BOUND_STEP is lost in a float


def make_exact(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed in place."""
    for pointer, each in check_schema(schema):
        if isinstance(each, dict):
            _check_min_properties(pointer, each)
            _move_bounds(each)
    return schema


def _check_min_properties(pointer: str, schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    num_required = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, num_required):
        raise SchemaError(f"{pointer}/minProperties", "more than 1 is taken only where as many are required")


def _move_bounds(schema: dict[str, Any]) -> None:
    lower = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_number(schema.get(key))]
    upper = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_number(schema.get(key))]
    if not lower or not upper or schema.get("type") == "integer" or min(upper) - max(lower) >= 1:
        return
    for excluded, included, bound, step in (
        ("exclusiveMinimum", "minimum", max(lower), BOUND_STEP),
        ("exclusiveMaximum", "maximum", min(upper), -BOUND_STEP),
    ):
        if schema.get(excluded) == bound == int(bound):
            del schema[excluded]
            schema[included] = bound + step


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_BOUND
