"""Which grammar each field stands for, and what its answers may be: held against llguidance, byte by byte."""

import contextlib
import gc
import json
import weakref
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from millstream.common.grammar_tokenizer import make_grammar_tokenizer
from millstream.tokenizer_manager.api_error import APIError
from millstream.tokenizer_manager.chat.tool_format import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_V11,
    ToolFormat,
)
from millstream.tokenizer_manager.grammar.grammar_child import json_grammar, to_lark
from millstream.tokenizer_manager.grammar.grammar_messages import Grammar
from millstream.tokenizer_manager.grammar.grammar_protocol import MAX_CHOICES, MoreGrammarFields, grammar_of
from millstream.tokenizer_manager.grammar.lark import lark_grammar, lark_regex, lark_text, schema_to_compile
from millstream.tokenizer_manager.grammar.schema_limits import SchemaError
from millstream.tokenizer_manager.grammar.structural_tag import structural_tag_grammar
from millstream.tokenizer_manager.grammar.tool_grammar import strict_tool_grammar, tool_grammar
from tests.text.sample_tokenizers import byte_level_backend, tokenizer_of

BYTES = LLTokenizer("byte")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
POINT_FORMAT = {"type": "json_schema", "json_schema": POINT}
TOKENIZER = tokenizer_of(byte_level_backend())


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether the text is a whole answer."""
    assert grammar is not None
    if grammar.kind == "json_schema":
        compiled = json_grammar(schema_to_compile(json.loads(grammar.text)))
    elif grammar.kind == "regex":
        compiled = LLMatcher.grammar_from_regex(grammar.text)
    else:
        lark = to_lark(grammar.text) if grammar.kind == "ebnf" else grammar.text
        compiled = lark_grammar(lark, [json.loads(schema) for _, schema in grammar.schemas])
    matcher = LLMatcher(BYTES, compiled, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def fields(**given: Any) -> MoreGrammarFields:
    """A body that says this."""
    return MoreGrammarFields(**given)


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}}, '{"x":1}', "{}"),
        ({"json_schema": POINT}, '{ "x" : 1 }', '{"x":  1}'),
        ({"json_schema": json.dumps(POINT)}, '{\n"x": 1\n}', '{\n "x": 1}'),
        ({"guided_json": POINT}, '{"x":1}', '{"y":1}'),
        ({"structured_outputs": {"json": POINT, "regex": None, "json_object": False}}, '{"x":1}', '{"x":"1"}'),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"regex": "a/b+"}, "a/bb", "a/"),
        ({"guided_regex": "^[0-9]{2}$"}, "12", "123"),
        ({"choice": ['"q"', "\u00e9/\n"]}, "\u00e9/\n", "q"),
        ({"guided_choice": ["a", "ab"]}, "ab", "b"),
        ({"ebnf": 'root ::= "a" b\nb ::= [0-9]+'}, "a12", "a"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "b"),
        ({"grammar": 'start: "(" start ")" | "x"'}, "((x))", "((x)"),
    ],
)
def test_each_field_allows_what_it_says(given: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(fields(**given))
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "regex": None}])
def test_nothing_is_asked(given: dict[str, Any]) -> None:
    assert grammar_of(fields(**given)) is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": {"const": "\0"}}, "json_schema"),
        ({"regex": 3}, "regex"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "choice"),
        ({"regex": "a", "json_schema": {}}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structural_tag": "{"}, "structural_tag"),
        ({"structural_tag": []}, "structural_tag"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        grammar_of(fields(**given), "at.")
    assert (caught.value.status, caught.value.param) == (400, f"at.{param}")


def test_sglangs_structural_tag_leaves_the_text_around_it_free() -> None:
    structures = [
        {"begin": "<f=a>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ]
    grammar = structural_tag_grammar({"structures": structures, "triggers": ["<f="]}, "tag")
    for good in ("", "free < text\n", '<f=a>{"x": 1}</f>', 'a <f=b>true</f> b <f=a>{"x":2}</f> c'):
        assert accepts(grammar, good), good
    for bad in ("<f=", "<f=c>1</f>", "<f=a>{}</f>", "<f=b>true", "<f=a>true</f>", 'x <f=b>true</f> <f=a>{"x"'):
        assert not accepts(grammar, bad), bad
    assert [param for param, _ in grammar.schemas] == [f"tag.structures[{i}].schema" for i in (0, 1)]


TAG = {"type": "tag", "begin": "<t>", "content": POINT_FORMAT, "end": "</t>"}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "const_string", "value": 'a\n"b"'}, ['a\n"b"'], ["a"]),
        ({"type": "const_string", "value": ""}, [""], ["a"]),
        ({"type": "regex", "pattern": "[ab]/c"}, ["a/c"], ["c"]),
        ({"type": "any_text"}, ["", "x\ny"], []),
        (TAG, ['<t>{"x":1}</t>'], ["", '{"x":1}']),
        (
            {"type": "sequence", "elements": [THINK, POINT_FORMAT]},
            ['<think></think>{"x":1}', '<think>a < b\n</think>{"x":1}'],
            ['{"x":1}', "<think>a</think>b", '<think>{"x":1}'],
        ),
        ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, ['<t>{"x":1}</t>', "no"], [""]),
        (
            {"type": "triggered_tags", "triggers": ["<t>"], "tags": [TAG], "at_least_one": True},
            ['a <t>{"x":1}</t> b'],
            ["a", "a <t>b"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<t>"], "tags": [TAG], "stop_after_first": True},
            ['a <t>{"x":1}</t>', "a"],
            ['<t>{"x":1}</t> b'],
        ),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": ", "},
            ["", '<t>{"x":1}</t>', '<t>{"x":1}</t>, <t>{"x":2}</t>'],
            ['<t>{"x":1}</t>, ', '<t>{"x":1}</t><t>{"x":1}</t>'],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [TAG],
                "separator": "",
                "at_least_one": True,
                "stop_after_first": True,
            },
            ['<t>{"x":1}</t>'],
            ["", '<t>{"x":1}</t><t>{"x":1}</t>'],
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else None,
)
def test_xgrammars_formats(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = structural_tag_grammar({"type": "structural_tag", "format": form}, "tag")
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def deep(depth: int) -> dict[str, Any]:
    """Formats within one another."""
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "tag.structures"),
        ({"structures": [{}], "triggers": ["<"]}, "tag.structures[0].begin"),
        ({"structures": [{"begin": "<a", "end": ""}], "triggers": ["<"]}, "tag.structures[0].schema"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["<"]}, "tag.structures[0].begin"),
        ({"structures": [{"begin": "<", "schema": {}, "end": ""}], "triggers": ["<", "["]}, "tag.triggers"),
        ({"format": {"type": "xml"}}, "tag.format.type"),
        ({"format": {"type": []}}, "tag.format.type"),
        ({"format": 3}, "tag.format"),
        ({"format": {"type": "sequence", "elements": [3]}}, "tag.format.elements[0]"),
        ({"format": {"type": "regex"}}, "tag.format.pattern"),
        ({"format": deep(30)}, None),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 500}}, "tag"),
    ],
)
def test_a_malformed_structural_tag_is_named(given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(APIError) as caught:
        structural_tag_grammar(given, "tag")
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith("tag")
    assert param is None or caught.value.param == param


TOOLS = [
    {
        "type": "function",
        "function": {"name": "move", "parameters": {"type": "object", "properties": POINT["properties"]}},
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("layout", [HERMES, LLAMA3, MISTRAL, HARMONY], ids=["hermes", "llama3", "mistral", "harmony"])
def test_a_forced_call_is_one_of_the_familys(layout: ToolFormat) -> None:
    def calls(*texts: str) -> str:
        return layout.begin + layout.separator.join(texts) + layout.end

    move, stop = layout.write("move", '{"x": 1}'), layout.write("stop", "{}")
    several, one = tool_grammar(TOOLS, layout, TOKENIZER), tool_grammar(TOOLS, layout, TOKENIZER, parallel=False)
    named = tool_grammar(TOOLS, layout, TOKENIZER, name="stop", parallel=False)
    for grammar in (several, one):
        assert accepts(grammar, calls(move))
        assert accepts(grammar, calls(stop))
        assert not accepts(grammar, calls(layout.write("jump", "{}")))
        assert not accepts(grammar, calls(layout.write("move", '{"y": 1}')))
        assert not accepts(grammar, "no")
    assert accepts(several, calls(move, stop, move))
    assert not accepts(one, calls(move, stop))
    assert accepts(named, calls(stop))
    assert not accepts(named, calls(move))
    assert [param for param, _ in several.schemas] == [f"tools[{i}].function.parameters" for i in (0, 1)]


def test_special_tokens_of_a_layout_are_meant_as_such() -> None:
    layout = ToolFormat("<|im_start|>", "<|im_end|>", "</s>")
    grammar = tool_grammar(TOOLS, layout, TOKENIZER, parallel=False)
    ids = {text: TOKENIZER.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>", "</s>")}
    assert f'<[{ids["<|im_start|>"]}]> "move" <[{ids["<|im_end|>"]}]> @schema_0' in grammar.text
    assert f"<[{ids['</s>']}]>" in grammar.text


def test_a_tool_grammar_keeps_no_tokenizer() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    tool_grammar(TOOLS, HERMES, tokenizer)
    strict_tool_grammar(TOOLS, HERMES, tokenizer)
    kept = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("layout", [HERMES, MISTRAL, MISTRAL_V11, DEEPSEEK_V3, DEEPSEEK_V31])
def test_strict_calls_inside_free_text(layout: ToolFormat) -> None:
    """Text is free up to the opening of a call; from there on nothing is left but a call."""
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    several = strict_tool_grammar(tools, layout, TOKENIZER)
    one = strict_tool_grammar(tools, layout, TOKENIZER, parallel=False)
    move, stop = ("move", '{"x": 1}'), ("stop", '{"what": "ever"}')
    for grammar in (several, one):
        assert accepts(grammar, "Just text, {with} <tool_ and \n lines.")
        assert accepts(grammar, "")
        assert accepts(grammar, "<think>\nhm\n</think>\n\n" + layout.write_all([move]))
        assert accepts(grammar, layout.write_all([stop]))
        assert not accepts(grammar, layout.write_all([("move", '{"y": 1}')]))
        assert not accepts(grammar, layout.write_all([("jump", "{}")]))
        assert not accepts(grammar, f"Ok. {layout.opening} and more")
    assert accepts(several, "Two: " + layout.write_all([move, stop]) + " done")
    assert not accepts(one, layout.write_all([move, stop]))


def test_strict_calls_and_reasoning_between_special_tokens() -> None:
    layout = ToolFormat("<|im_end|>", "(", ")", opening="<|im_end|>")
    grammar = strict_tool_grammar(TOOLS, layout, TOKENIZER, reasoning_tags=("</s>", "<none>"))
    ids = {text: TOKENIZER.token_to_id(text) for text in ("<|im_end|>", "</s>")}
    assert f"head: text <[{ids['<|im_end|>']}]>" in grammar.text
    assert f"reasoning: text <[{ids['</s>']}]>" in grammar.text
    compiled = lark_grammar(grammar.text, [{"type": "object"}] * 2)
    tokens = make_grammar_tokenizer(TOKENIZER, byte_level_backend().get_vocab_size())
    for text, is_good in (("hm</s>So <|im_end|>stop({}).", True), ("hm<|im_end|>jump", False)):
        matcher = LLMatcher(tokens, compiled, log_level=0)
        token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) == is_good


@pytest.mark.parametrize("layout", [DEEPSEEK_V3, DEEPSEEK_V31])
def test_a_deepseek_call_without_the_tag_around_all_calls_is_guarded_too(layout: ToolFormat) -> None:
    """The parser takes it for a call."""
    grammar = strict_tool_grammar(TOOLS, layout, TOKENIZER)
    assert accepts(grammar, "Ok: " + layout.write("stop", "{}"))
    assert not accepts(grammar, "Ok: " + layout.write("jump", "{}"))


def test_a_special_token_around_calls_may_stand_before_them() -> None:
    layout = ToolFormat("<|im_end|>", "(", ")", "</s>", "\n", opening="<|im_end|>")
    grammar = strict_tool_grammar(TOOLS, layout, TOKENIZER)
    compiled = lark_grammar(grammar.text, [{"type": "object"}] * 2)
    tokens = make_grammar_tokenizer(TOKENIZER, byte_level_backend().get_vocab_size())
    for calls, is_good in (
        ("<|im_end|>stop({})\n<|im_end|>stop({})", True),
        ("<|im_end|>jump({})", False),
        ("no", False),
    ):
        matcher = LLMatcher(tokens, compiled, log_level=0)
        token_ids = TOKENIZER.encode(f"So </s>{calls}", add_special_tokens=False)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) == is_good


@pytest.mark.parametrize("depth", [200, 900])
def test_schemas_of_any_depth_are_taken_or_refused(depth: int) -> None:
    schema = msgspec.json.decode('{"items":' * depth + "{}" + "}" * depth)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ""}], "triggers": ["<"]}
    for make in (
        lambda: grammar_of(fields(json_schema=schema)),
        lambda: structural_tag_grammar(tag, "tag"),
        lambda: tool_grammar([tool], HERMES, TOKENIZER),
    ):
        with contextlib.suppress(APIError):
            make()


def test_lark_pieces_escape_what_they_must() -> None:
    assert lark_text("") == ""
    assert lark_text('a"b\n\\') == '"a\\"b\\n\\\\"'
    assert lark_text("a<x>b", {"<x>": 7, "<x>b": 8}) == '"a" <[8]>'
    assert lark_regex("a/b\\/c\n[/]") == "/a\\/b\\/c\\n[\\/]/"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a":1,"b\\n":"x"}', '{"a":1,"\\u0061":"x"}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"b":"x","a":1}', '{"\\u0061":"x"}'),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1.25", "1"),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "-1.25", "-1"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 6}, "1.5", "1"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2.5}, "2", "1"),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, '{"a":1,"b":2}', '{"a":1,"a":2}'),
    ],
)
def test_what_a_schema_admits_is_valid(schema: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(fields(json_schema={"type": "object", **schema}))
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_a_key_that_comes_twice_can_not_count_twice() -> None:
    with pytest.raises(SchemaError, match=r"^#/items/minProperties: more than 1"):
        schema_to_compile({"items": {"minProperties": 2}})
