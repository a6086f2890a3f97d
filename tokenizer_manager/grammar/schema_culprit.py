"""The place in a JSON Schema that is at fault for the whole: each is compiled alone, with the references of the whole."""

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import quote

from .schema_limits import check_schema, inner_schemas
from .schema_refs import escape, find_target, unescape

BASE = "urn:millstream:schema"
SEARCH_SECONDS = 0.5
DEFINITIONS = ("$defs/", "definitions/")  # which count only where they are referred to
UNIMPLEMENTED = "Unimplemented keys: "
UNSATISFIABLE, REQUIRED_ITEM = "Unsatisfiable schema", "required item is unsatisfiable"

Compile = Callable[[dict[str, Any]], str | None]


def find_culprit(schema: dict[str, Any], error: str, compile_error: Compile) -> tuple[str, str]:
    """The innermost place that brings `error`, which compiling the whole has brought, and what is wrong there; "#" if unsure.

    `compile_error` tells what is wrong with a schema.
    """
    search = _Search(schema, compile_error)
    if search.error_at("#") != _reason(error):
        return "#", error
    if error.startswith(UNIMPLEMENTED):
        search.leave_out_all_without(set(re.findall(r'"([^"]+)"', _reason(error))))
    found, _ = search.culprit("#", _reason(error), 0)
    return (found.pointer, found.error) if found is not None else ("#", error)


class _Culprit(NamedTuple):
    pointer: str
    error: str


class _Search:
    """Goes down from the whole to parts and references that fail for the same reason."""

    def __init__(self, schema: dict[str, Any], compile_error: Compile) -> None:
        self._whole = {key: value for key, value in schema.items() if key not in ("$schema", "$id", "id")}
        self._places = dict(check_schema(self._whole))
        self._named = {**_with_base(self._whole, set(map(id, self._places.values()))), "$id": BASE}
        self._compile_error = compile_error
        self._inner = {pointer: self._inner_places(pointer) for pointer in self._places}
        self._depths: dict[str, int] = {}  # of places that were entered
        self._end = time.monotonic() + SEARCH_SECONDS

    def error_at(self, pointer: str) -> str | None:
        """What is wrong with this place alone; None when there is no more time."""
        if time.monotonic() > self._end:
            return None
        reference = f"{BASE}#{quote(pointer[1:], safe='/$~')}"
        error = self._compile_error({"$id": f"{BASE}:place", "$defs": {"whole": self._named}, "$ref": reference})
        return None if error is None else _reason(error)

    def culprit(self, pointer: str, error: str, depth: int) -> tuple[_Culprit | None, int]:
        """A place at or below this failing one; None where it fails only because a place above does, and that one's depth."""
        self._depths[pointer] = lowest = depth
        for inner in self._inner[pointer]:
            if inner in self._depths:
                lowest = min(lowest, self._depths[inner])
                continue
            inner_error = self.error_at(inner)
            if inner_error is None or not _explains(inner, inner_error, error):
                continue
            found, low = self.culprit(inner, inner_error, depth + 1)
            if found is not None:
                return found, depth
            lowest = min(lowest, low)
        return (_Culprit(pointer, error), depth) if lowest == depth else (None, lowest)

    def leave_out_all_without(self, keywords: set[str]) -> None:
        """Go only where one of these is reached: each place costs a compilation of the whole."""
        outer: dict[str, list[str]] = {}
        for pointer, inner in self._inner.items():
            for each in inner:
                outer.setdefault(each, []).append(pointer)
        left = [place for place, schema in self._places.items() if not keywords.isdisjoint(_keywords(schema))]
        leading = set(left)
        while left:
            new = set(outer.get(left.pop(), ())) - leading
            leading |= new
            left += new
        self._inner = {place: [each for each in inner if each in leading] for place, inner in self._inner.items()}

    def _inner_places(self, pointer: str) -> list[str]:
        schema = self._places[pointer]
        if not isinstance(schema, dict):
            return []
        target = find_target(self._whole, schema["$ref"]) if "$ref" in schema else None
        referred = [target[0]] if target is not None else []
        return referred + [f"{pointer}/{path}" for path, _ in inner_schemas(schema) if not path.startswith(DEFINITIONS)]


def _keywords(schema: Any) -> Iterable[str]:
    return schema if isinstance(schema, dict) else ()


def _reason(error: str) -> str:
    return error.split("\n  while processing", maxsplit=1)[0]


def _with_base(part: Any, places: set[int]) -> Any:
    """A copy, in which the references of these schemas (ids of objects) begin with BASE."""
    if isinstance(part, list):
        return [_with_base(each, places) for each in part]
    if not isinstance(part, dict):
        return part
    new = {key: _with_base(value, places) for key, value in part.items()}
    return {**new, "$ref": BASE + new["$ref"]} if id(part) in places and "$ref" in part else new


def _explains(pointer: str, inner: str, outer: str) -> bool:
    if inner == outer:
        return True
    name = unescape(pointer.rpartition("/")[2])
    return inner.startswith(UNSATISFIABLE) and (f"required property '{name}'" in outer or REQUIRED_ITEM in outer)


def written_pointer(schema: Any, pointer: str) -> str:
    """A place in the schema that is compiled, as its client wrote it: there anyOf may stand for oneOf."""
    written = "#"
    for part in pointer.split("/")[1:]:
        key = unescape(part)
        if key == "anyOf" and isinstance(schema, dict) and key not in schema:
            key = "oneOf"
        if isinstance(schema, list):
            schema = schema[int(key)]
        elif key in schema:
            schema = schema[key]
        else:  # a pattern, which was rewritten
            break
        written += f"/{escape(key)}"
    return written
