"""The fields of a request that constrain its output, in OpenAI's, SGLang's and vLLM's words: at most one of them."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..api_error import bad_request, unsupported
from .grammar_messages import Grammar, Kind
from .lark import lark_text, schema_text
from .structural_tag import structural_tag_grammar

MAX_CHOICES = 1000
ANY_OBJECT = '{"type": "object"}'
GRAMMAR_FIELDS = (
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "choice",
    "structural_tag",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


class GrammarFields(msgspec.Struct, kw_only=True):
    """What a body or its sampling parameters may say of the output's form."""

    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None


class MoreGrammarFields(GrammarFields, kw_only=True):
    """What the OpenAI routes know besides: OpenAI's own field, plain names, and vLLM's."""

    response_format: Any = None
    grammar: Any = None
    choice: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


def grammar_of(body: GrammarFields, at: str = "") -> Grammar | None:
    """The grammar that a body asks for, None for none; APIError names a field that is wrong, or is one too many."""
    found = list(_grammars(body, at))
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise bad_request(f"{names}: give one of them", found[1].param, "conflicting_grammars")
    return found[0] if found else None


def response_format_grammar(given: Any, param: str) -> Grammar | None:
    """OpenAI's response_format, SGLang's structural_tag among its types."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, param)
    if kind == "json_schema":
        schema = given.get("json_schema")
        if not isinstance(schema, dict) or "schema" not in schema:
            raise bad_request(
                f"{param}.json_schema.schema is required", f"{param}.json_schema.schema", "invalid_schema"
            )
        return schema_grammar(schema["schema"], f"{param}.json_schema.schema")
    if kind == "structural_tag":
        return structural_tag_grammar(given, param)
    raise bad_request(
        f"{param}.type must be one of text, json_object, json_schema, structural_tag", f"{param}.type", "invalid_value"
    )


def _grammars(body: GrammarFields, at: str) -> Iterator[Grammar]:
    for name in GRAMMAR_FIELDS:
        given = getattr(body, name, None)
        if given is not None:
            grammar = READERS[name](given, at + name)
            if grammar is not None:
                yield grammar


def _structured_outputs(given: Any, param: str) -> Grammar | None:
    """vLLM's: one of json, regex, choice, grammar, json_object and structural_tag."""
    if not isinstance(given, dict):
        raise bad_request(f"{param} must be an object", param, "invalid_type")
    found = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        if name not in STRUCTURED:
            raise unsupported(f"{param}.{name}")
        found.append(STRUCTURED[name](value, f"{param}.{name}"))
    if len(found) != 1:
        raise bad_request(f"{param} must hold one of {', '.join(STRUCTURED)}", param, "conflicting_grammars")
    return found[0]


def schema_grammar(given: Any, param: str) -> Grammar:
    """A JSON Schema, as an object or as its text."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{param} is not valid JSON", param, "invalid_schema") from None
    if not isinstance(given, dict | bool):
        raise bad_request(f"{param} must be a JSON Schema", param, "invalid_schema")
    text = schema_text(given, param)
    if "\\u0000" in text:
        raise bad_request(f"{param} must not hold NUL", param, "invalid_schema")
    return Grammar("json_schema", text, param)


def _json_object(given: Any, param: str) -> Grammar:
    return Grammar("json_schema", ANY_OBJECT, param)


def _choice(given: Any, param: str) -> Grammar:
    """One of several texts."""
    is_good = isinstance(given, list) and all(isinstance(each, str) and each for each in given)
    if not is_good or not 0 < len(given) <= MAX_CHOICES:
        raise bad_request(
            f"{param} must be a list of 1 to {MAX_CHOICES} texts that are not empty", param, "invalid_grammar"
        )
    return Grammar("lark", "start: " + " | ".join(map(lark_text, given)), param)


def _structural_tag(given: Any, param: str) -> Grammar:
    """As an object or as its text."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{param} is not valid JSON", param, "invalid_grammar") from None
    return structural_tag_grammar(given, param)


def _text_of(kind: Kind) -> Callable[[Any, str], Grammar]:
    def read(given: Any, param: str) -> Grammar:
        if not isinstance(given, str) or not given:
            raise bad_request(f"{param} must be a text that is not empty", param, "invalid_type")
        return Grammar(kind, given, param)

    return read


Reader = Callable[[Any, str], Grammar | None]
STRUCTURED: dict[str, Reader] = {
    "json": schema_grammar,
    "regex": _text_of("regex"),
    "choice": _choice,
    "grammar": _text_of("ebnf"),
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
READERS: dict[str, Reader] = {
    "response_format": response_format_grammar,
    "json_schema": schema_grammar,
    "regex": _text_of("regex"),
    "ebnf": _text_of("ebnf"),
    "grammar": _text_of("ebnf"),
    "choice": _choice,
    "structural_tag": _structural_tag,
    "structured_outputs": _structured_outputs,
    "guided_json": schema_grammar,
    "guided_regex": _text_of("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text_of("ebnf"),
}
