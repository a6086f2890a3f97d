"""Grammars before they reach the model: what is refused, where it says so, and that none can hurt the server."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import uvloop

from millstream.common.model_path import find_model
from millstream.tokenizer_manager.api_error import APIError
from millstream.tokenizer_manager.grammar.grammar_checker import (
    COMPILE_SECONDS,
    MAX_EBNF_CHARS,
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMARS,
    MAX_KNOWN_BYTES,
    GrammarChecker,
)
from millstream.tokenizer_manager.grammar.grammar_messages import Grammar, Kind
from millstream.tokenizer_manager.grammar.regex_limits import MAX_TEXT_CHARS, RegexError, check_regex
from millstream.tokenizer_manager.grammar.schema_limits import MAX_DEPTH, MAX_NODES, SchemaError, check_schema
from millstream.tokenizer_manager.metrics import Metrics

LIMIT = 60.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 2 * LIMIT))


@asynccontextmanager
async def checker_of(seconds: float = LIMIT) -> AsyncIterator[GrammarChecker]:
    """A started checker for the packaged model; afterwards its child is gone."""
    before = set(psutil.Process().children())
    checker = GrammarChecker(Metrics("test"), seconds=seconds)
    checker.start(find_model("smollm2"))
    try:
        yield checker
    finally:
        checker.close()
        await asyncio.sleep(0)
    assert set(psutil.Process().children()) <= before


def nested(depth: int) -> dict[str, Any]:
    """So many schemas within one another."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
for _ in range(11):
    OVERLAPPING = {"oneOf": [OVERLAPPING, {"type": "integer"}]}
BAD: list[tuple[Kind, Any, str, str]] = [
    ("json_schema", {"type": "zzz"}, "invalid_schema", "#: Invalid type: zzz"),
    ("json_schema", {"properties": {"a/b": {"items": {"type": "zzz"}}}}, "invalid_schema", "#/properties/a~1b/items:"),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "invalid_schema", "no output"),
    ("json_schema", {"$ref": "#/$defs/missing"}, "invalid_schema", "does not exist"),
    ("json_schema", {"$ref": "http://localhost/x"}, "invalid_schema", "#/$ref: 'http://localhost/x' does"),
    ("json_schema", nested(MAX_DEPTH + 1), "invalid_schema", "nested more than 32 deep"),
    ("json_schema", OVERLAPPING, "invalid_schema", "no value can match two"),
    ("json_schema", {"enum": [f"v{i}" for i in range(3000)]}, "invalid_schema", "#: the schema has more than"),
    ("json_schema", {"properties": {"a": {"type": "string", "pattern": "("}}}, "invalid_schema", "#/properties/a"),
    ("json_schema", {"properties": {"a": {"pattern": "x{1,9999}"}}}, "invalid_schema", "#/properties/a/pattern:"),
    ("json_schema", {"allOf": [{"type": "string"}, {"not": {}}]}, "invalid_schema", "#/allOf/1"),
    ("json_schema", {"uniqueItems": True}, "invalid_schema", "uniqueItems"),
    (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f".*{x}.{{9}}.*"} for x in "abc"]},
        "invalid_schema",
        "too much",
    ),
    ("json_schema", {"items": {"minProperties": 2}}, "invalid_schema", "#/items/minProperties: more than 1"),
    ("json_schema", {"minLength": 5, "maxLength": 2, "type": "string"}, "invalid_schema", "Unsatisfiable"),
    ("json_schema", {"items": {"const": ["x" * MAX_TEXT_CHARS]}}, "invalid_schema", "#/items/const: a value has more"),
    ("json_schema", {"enum": ["a", "x" * MAX_TEXT_CHARS]}, "invalid_schema", "#/enum: a value has more than"),
    ("json_schema", {"properties": {"x" * MAX_TEXT_CHARS: True}}, "invalid_schema", "#/properties: a value has more"),
    ("lark", 'start: "' + "x" * MAX_TEXT_CHARS + '"', "invalid_grammar", "a text in a grammar"),
    ("regex", "(", "invalid_regex", "unclosed group"),
    ("regex", "a{1,100000}", "invalid_regex", "more than 1000 times"),
    ("regex", "(a{1,1000}){1,1000}", "invalid_regex", "more than 1000 times"),
    ("regex", "(?<=a)b", "invalid_regex", "look-around"),
    ("regex", r"\1", "invalid_regex", "backreferences"),
    ("regex", "a\0b", "invalid_regex", "NUL"),
    ("lark", "start: missing", "invalid_grammar", "missing"),
    ("lark", "start: start", "invalid_grammar", "no output"),
    ("lark", "rule: 'a'", "invalid_grammar", ""),
    ("lark", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "invalid_grammar", "nested"),
    ("ebnf", 'root ::= root "a" | "b"', "invalid_grammar", "begins with itself"),
    ("ebnf", 'root ::= x\nx ::= ( y )\ny ::= "a" | x "b"', "invalid_grammar", "begins with itself"),
    ("ebnf", "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "invalid_grammar", "deeply nested"),
    ("ebnf", "root ::= [", "invalid_grammar", ""),
    ("ebnf", 'root ::= "\0"', "invalid_grammar", "NUL"),
]


def text_of(kind: Kind, given: Any) -> str:
    """As it stands in a Grammar."""
    return json.dumps(given) if kind == "json_schema" else str(given)


def test_bad_grammars_are_refused_with_their_place_in_two_seconds_and_the_child_lives() -> None:
    async def check() -> None:
        async with checker_of() as checker:
            await checker.compile(Grammar("regex", "a", "regex"))
            pid = checker.pid
            for kind, given, code, message in BAD:
                start = time.monotonic()
                with pytest.raises(APIError) as caught:
                    await checker.compile(Grammar(kind, text_of(kind, given), "the.field"))
                error = caught.value
                assert time.monotonic() - start < COMPILE_SECONDS + 0.5
                assert (error.status, error.param, error.code) == (400, "the.field", code), (given, error.message)
                assert error.message.startswith("the.field: ")
                assert message in error.message, error.message
                assert "\n" not in error.message
                assert "/work" not in error.message
            assert checker.pid == pid

    run(check())


PETS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")
}
GOOD: list[tuple[Kind, Any]] = [
    ("json_schema", True),
    ("json_schema", {}),
    ("json_schema", {"type": "object"}),
    ("json_schema", {"oneOf": [{"type": "null"}, {"type": "integer"}]}),
    ("json_schema", nested(MAX_DEPTH)),
    ("regex", "[0-9]{1,1000}/(a|b)*"),
    ("regex", r"\x{1F600}|\p{L}+"),
    ("lark", 'start: start "a" | "b"'),
    ("ebnf", 'root ::= "a" | b # a "rule"\nb ::= [0-9]+ root? ("x" | root)'),
    ("json_schema", {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS}),
    ("json_schema", {"oneOf": [{"const": 1}, {"enum": [2, "1"]}, {"const": True}]}),
    ("ebnf", 'start: "a"'),
]


def test_good_grammars_are_compiled_and_remembered() -> None:
    async def check() -> None:
        async with checker_of() as checker:
            compiled = [await checker.compile(Grammar(kind, text_of(kind, given), "f")) for kind, given in GOOD]
            assert all("grammars" in json.loads(text) for text in compiled)
            assert checker.pid is not None
            os.kill(checker.pid, signal.SIGSTOP)  # whoever asks it now waits for ever
            again = [await checker.compile(Grammar(kind, text_of(kind, given), "g")) for kind, given in GOOD]
            assert again == compiled

    run(check())


def test_a_child_that_hangs_is_killed_and_that_grammar_alone_is_refused() -> None:
    async def check() -> None:
        async with checker_of(seconds=1.0) as checker:
            await checker.compile(Grammar("regex", "a", "regex"))
            first = checker.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(APIError, match="longer than 1 s") as caught:
                await checker.compile(Grammar("regex", "b", "regex"))
            assert (caught.value.status, caught.value.code) == (400, "grammar_timeout")
            assert not psutil.pid_exists(first)
            assert await checker.compile(Grammar("regex", "b", "regex"))
            assert b'num_grammar_timeout_total{model_name="test"} 1.0' in checker._metrics.render()

    run(check())


def test_schemas_inside_a_grammar_are_named_by_their_own_field() -> None:
    async def check() -> None:
        async with checker_of() as checker:
            schemas = (("tools[0]", '{"type": "object"}'), ("tools[1]", '{"properties": {"a": {"type": 5}}}'))
            with pytest.raises(APIError) as caught:
                await checker.compile(Grammar("lark", 'start: "a"', "tools", schemas))
            assert caught.value.param == "tools[1]"
            assert "#/properties/a" in caught.value.message

    run(check())


def test_too_long_a_grammar_is_not_even_sent() -> None:
    async def check() -> None:
        checker = GrammarChecker(Metrics("test"))
        for kind, most in (("regex", MAX_GRAMMAR_CHARS), ("ebnf", MAX_EBNF_CHARS)):
            with pytest.raises(APIError, match="characters"):
                await checker.compile(Grammar(kind, "a" * (most + 1), "regex"))  # type: ignore[arg-type]

    run(check())


def test_the_same_grammar_at_the_same_time_is_compiled_once_and_who_is_gone_leaves_it_to_the_others() -> None:
    async def check() -> None:
        async with checker_of() as checker:
            good, bad = Grammar("regex", "a", "regex"), Grammar("regex", "(", "regex")
            everyone = [asyncio.create_task(checker.compile(each)) for each in [good, bad] * 20]
            await asyncio.sleep(0)
            everyone[0].cancel()
            found = await asyncio.gather(*everyone, return_exceptions=True)
            assert isinstance(found[0], asyncio.CancelledError)
            assert len(set(found[2::2])) == 1
            assert all(isinstance(error, APIError) for error in found[1::2])
            assert b'grammar_compilation_time_seconds_count{model_name="test"} 2.0' in checker._metrics.render()
            alone = asyncio.create_task(checker.compile(Grammar("regex", "b", "regex")))
            await asyncio.sleep(0)
            alone.cancel()
            await asyncio.wait([alone])
            assert not checker._shared
            assert await checker.compile(Grammar("regex", "b", "regex"))

    run(check())


def test_a_call_brings_so_many_different_grammars_and_the_same_ones_are_one() -> None:
    async def check() -> None:
        async with checker_of() as checker:
            given = [Grammar("regex", f"a{i}", f"sampling_params[{i}].regex") for i in range(MAX_GRAMMARS + 1)]
            found = await checker.compile_all([given[0], None, given[1], given[0], given[1]] * 100)
            assert found[0] == found[3] != found[2] == found[4]
            assert found[1] is None
            assert len(await checker.compile_all(given[:MAX_GRAMMARS])) == MAX_GRAMMARS
            with pytest.raises(APIError, match="64 different grammars at most, not 65") as caught:
                await checker.compile_all(given)
            error = caught.value
            assert (error.status, error.param, error.code) == (400, "sampling_params[64].regex", "too_many_grammars")

    run(check())


def test_what_is_remembered_is_bounded() -> None:
    checker = GrammarChecker(Metrics("test"))
    for index in range(1000):
        checker._remember(("regex", f"{index}" + "x" * 10_000), "y")
    assert checker._known_bytes <= MAX_KNOWN_BYTES
    assert 100 < len(checker._known) < 400
    assert checker._known_bytes == sum(4 * (len(key[0]) + len(key[1]) + 1) + 500 for key in checker._known)


@pytest.mark.parametrize(
    ("pattern", "is_good"),
    [
        ("a{1000}", True),
        ("a{1001}", False),
        ("a{0,1001}", False),
        ("(a{10}){100}", True),
        ("(a{10}){101}", False),
        ("((a{10}){10}b){11}", False),
        ("(a{500})(b{500}){2}", True),
        ("a{99}{99}", False),
        (r"\{5000\}", True),
        ("[{5000}]", True),
        (r"\x{20000}", True),
        ("x{" + "9" * 5000 + "}", False),
        ("(" * MAX_TEXT_CHARS, True),
        ("[" * MAX_TEXT_CHARS, True),
        ("a" * (MAX_TEXT_CHARS + 1), False),
    ],
)
def test_what_a_regex_may_repeat(pattern: str, is_good: bool) -> None:
    start = time.monotonic()
    try:
        check_regex(pattern)
    except RegexError:
        assert not is_good
    else:
        assert is_good
    assert time.monotonic() - start < 0.5


def test_a_schemas_size_is_bounded_before_it_is_walked_to_its_end() -> None:
    wide = {"properties": {f"p{i}": {} for i in range(MAX_NODES + 5)}}
    with pytest.raises(SchemaError, match="more than 2000"):
        check_schema(wide)
    assert len(check_schema({"properties": {f"p{i}": {} for i in range(100)}})) == 101
    with pytest.raises(SchemaError, match="#/anyOf/0: a schema is an object"):
        check_schema({"anyOf": [3]})
