"""Structural tags: free text in which tags have a fixed form, in SGLang's shape and in XGrammar's.

{"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}
{"type": "structural_tag", "format": {"type": "triggered_tags" | "tag" | "sequence" | ..., ...}}
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..api_error import APIError, bad_request
from .grammar_messages import Grammar
from .lark import ANY_TEXT, lark_regex, lark_schema, lark_text, schema_text

MAX_PARTS = 256  # rules of one grammar
MAX_DEPTH = 16
EMPTY = '""'


def structural_tag_grammar(given: Any, param: str) -> Grammar:
    """The grammar of a structural tag; APIError names what is wrong in it."""
    if not isinstance(given, dict):
        raise _wrong(param, "must be an object")
    writer = _Writer(param)
    if "format" in given:
        start = writer.format(given["format"], f"{param}.format", 0)
    else:
        start = writer.structures(given, param)
    return Grammar("lark", writer.lark(start), param, tuple(writer.schemas))


class _Writer:
    """Writes one rule for each part; every method gives the name of the rule that it wrote."""

    def __init__(self, param: str) -> None:
        self._param = param
        self.schemas: list[tuple[str, str]] = []
        self._rules: list[str] = []

    def lark(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def structures(self, given: dict[str, Any], param: str) -> str:
        """SGLang's shape: any text, and a tag wherever a trigger begins one."""
        tags = []
        for index, each in enumerate(_list(given, "structures", param)):
            at = f"{param}.structures[{index}]"
            begin, end = _text(_dict(each, at), "begin", at), _text(each, "end", at)
            schema = self._schema(each.get("schema"), f"{at}.schema")
            tags.append(_Tag(begin, f"{schema} {lark_text(end)}", at))
        return self._rule(f"({' | '.join(self._calls(given, tags, param))})* {self._rule(ANY_TEXT)}")

    def format(self, given: Any, param: str, depth: int) -> str:
        """One of XGrammar's formats."""
        if depth > MAX_DEPTH:
            raise _wrong(param, f"formats are nested more than {MAX_DEPTH} deep")
        kind = _dict(given, param).get("type")
        write = self._writers().get(kind) if isinstance(kind, str) else None
        if write is None:
            raise _wrong(f"{param}.type", f"must be one of {', '.join(self._writers())}")
        return write(given, param, depth + 1)

    def _writers(self) -> dict[str, Callable[[dict[str, Any], str, int], str]]:
        return {
            "const_string": lambda given, at, depth: self._rule(lark_text(_text(given, "value", at))),
            "json_schema": self._json_schema,
            "regex": lambda given, at, depth: self._rule(lark_regex(_text(given, "pattern", at))),
            "any_text": lambda given, at, depth: self._rule(ANY_TEXT),
            "sequence": lambda given, at, depth: self._rule(" ".join(self._elements(given, at, depth))),
            "or": lambda given, at, depth: self._rule(" | ".join(self._elements(given, at, depth))),
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def _json_schema(self, given: dict[str, Any], param: str, depth: int) -> str:
        return self._schema(given.get("json_schema"), f"{param}.json_schema")

    def _schema(self, schema: Any, at: str) -> str:
        if not isinstance(schema, dict | bool):
            raise _wrong(at, "must be a JSON Schema")
        self.schemas.append((at, schema_text(schema, at)))
        return self._rule(lark_schema(len(self.schemas) - 1))

    def _elements(self, given: dict[str, Any], param: str, depth: int) -> list[str]:
        elements = _list(given, "elements", param)
        return [self.format(each, f"{param}.elements[{index}]", depth) for index, each in enumerate(elements)]

    def _tag(self, given: dict[str, Any], param: str, depth: int) -> str:
        tag = self._read_tag(given, param, depth)
        return self._rule(f"{lark_text(tag.begin)} {tag.rest}")

    def _triggered_tags(self, given: dict[str, Any], param: str, depth: int) -> str:
        calls = " | ".join(self._calls(given, self._tags(given, param, depth), param))
        must = bool(given.get("at_least_one"))
        if given.get("stop_after_first"):
            return self._rule(calls if must else f"{calls} | {self._rule(ANY_TEXT)}")
        return self._rule(f"({calls}){'+' if must else '*'} {self._rule(ANY_TEXT)}")

    def _tags_with_separator(self, given: dict[str, Any], param: str, depth: int) -> str:
        tags = [f"{lark_text(tag.begin)} {tag.rest}" for tag in self._tags(given, param, depth)]
        one, separator = self._rule(" | ".join(tags)), lark_text(_text(given, "separator", param))
        more = "" if given.get("stop_after_first") else f" ({separator} {one})*"
        return self._rule(f"{one}{more}" if given.get("at_least_one") else f"({one}{more})?")

    def _tags(self, given: dict[str, Any], param: str, depth: int) -> list["_Tag"]:
        tags = enumerate(_list(given, "tags", param))
        return [self._read_tag(_dict(tag, f"{param}.tags[{i}]"), f"{param}.tags[{i}]", depth) for i, tag in tags]

    def _read_tag(self, given: dict[str, Any], param: str, depth: int) -> "_Tag":
        begin, end = _text(given, "begin", param), _text(given, "end", param)
        content = _dict(given.get("content"), f"{param}.content")
        if content.get("type") == "any_text" and end:
            return _Tag(begin, self._rule(f"{ANY_TEXT} {lark_text(end)}", is_lazy=True), param)
        return _Tag(begin, f"{self.format(content, f'{param}.content', depth)} {lark_text(end)}", param)

    def _calls(self, given: dict[str, Any], tags: list["_Tag"], param: str) -> list[str]:
        """A rule for each trigger: free text up to it, then the rest of one of its tags."""
        triggers = _list(given, "triggers", param)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _wrong(f"{param}.triggers", "must be texts that are not empty")
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = next((each for each in triggers if tag.begin.startswith(each)), None)
            if trigger is None:
                raise _wrong(f"{tag.at}.begin", "must begin with one of the triggers")
            rests[trigger].append(f"{lark_text(tag.begin[len(trigger) :])} {tag.rest}")
        if not all(rests.values()):
            raise _wrong(f"{param}.triggers", "must each begin a tag")
        heads = {trigger: self._rule(f"{ANY_TEXT} {lark_text(trigger)}", is_lazy=True) for trigger in rests}
        return [self._rule(f"{heads[trigger]} ({' | '.join(each)})") for trigger, each in rests.items()]

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        """A lazy rule ends as soon as it can."""
        if len(self._rules) >= MAX_PARTS:
            raise _wrong(self._param, f"has more than {MAX_PARTS} parts")
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body.strip() or EMPTY}")
        return name


class _Tag(NamedTuple):
    """A tag that is read: what its text begins with, the grammar of the rest, and where it stands."""

    begin: str
    rest: str
    at: str


def _wrong(param: str, message: str) -> APIError:
    return bad_request(f"{param} {message}", param, "invalid_grammar")


def _dict(given: Any, param: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _wrong(param, "must be an object")
    return given


def _list(given: dict[str, Any], name: str, param: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not found:
        raise _wrong(f"{param}.{name}", "must be a list that is not empty")
    return found


def _text(given: dict[str, Any], name: str, param: str) -> str:
    found = given.get(name)
    if not isinstance(found, str):
        raise _wrong(f"{param}.{name}", "must be a text")
    return found
