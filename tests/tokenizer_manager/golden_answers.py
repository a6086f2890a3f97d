"""Answers as each family of models writes them, made in all combinations, with what is to be read out of them."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
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
from tests.tokenizer_manager.parsed_answers import Answer

VALUES: list[dict[str, Any]] = [
    {},
    {"text": "Bern"},
    {"text": ""},
    {"text": " blanks  around "},
    {"text": 'a "quoted" word, a \\ and a \\n'},
    {"text": "lines\n\n\tand tabs\r\n"},
    {"text": "Z\u00fcrich \u6771\u4eac \U0001f600 \u0645\u0631\u062d\u0628\u0627"},
    {"text": "e\u0301 \u200d \u00a0 \u2028 \ufeff"},
    {"text": "}} ]] {{ [[ ,,, ;;; ::"},
    {"text": "<tool_call> </tool_call> [TOOL_CALLS] <|python_tag|> <think> [THINK]"},
    {"text": "```json\n{}\n``` and $x^2$ & <b>"},
    {"text": '{"name": "time", "arguments": {}}'},
    {"text": "x" * 300},
    {"text": "true"},
    {"text": "42"},
    {"number": 0},
    {"number": -17},
    {"number": 2**53},
    {"number": 3.25},
    {"number": -1.5e-9},
    {"number": 6.02e23},
    {"flag": True},
    {"flag": False},
    {"nothing": None},
    {"list": []},
    {"list": [1, -2.5, "three", True, None]},
    {"list": [[], [[]], [[1], [2, [3]]]]},
    {"list": ["]", "[", '"', "\\", ","]},
    {"object": {}},
    {"object": {"a": {"b": {"c": {"d": [{"e": None}]}}}}},
    {"object": {"": "empty key", "with space": 1, "\u00e9": 2, 'q"': 3}},
    {"text": "a", "number": 1, "flag": True, "nothing": None, "list": [1], "object": {"k": "v"}},
    {"text": "one", "list": [{"x": [{"y": "}"}]}, "\u4e2d"], "number": 5},
]
BROKEN_VALUE = VALUES[-2]
TYPES = {"text": "string", "number": "number", "flag": "boolean", "nothing": "null", "list": "array"}
PROPERTIES = {key: {"type": TYPES.get(key, "object")} for value in VALUES for key in value}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("find", "look_up-2.b")
]
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Style:
    """How one family writes: reasoning ahead of an answer, text ahead of calls, calls."""

    family: ChatFamily
    calls: Callable[[Sequence[Call], bool], str]  # the flag: characters beyond ASCII as escapes
    reasoning: Callable[[str], str] | None
    text: Callable[[str], str] = str


def _in(layout: ToolFormat) -> Callable[[Sequence[Call], bool], str]:
    return lambda calls, is_ascii: layout.write_all(
        [(name, json.dumps(value, ensure_ascii=is_ascii)) for name, value in calls]
    )


def _harmony(calls: Sequence[Call], is_ascii: bool) -> str:
    texts = [HARMONY.write(name, json.dumps(value, ensure_ascii=is_ascii)) for name, value in calls]
    return "".join(f"<|start|>assistant{text}<|call|>" for text in texts)


def _xml(calls: Sequence[Call], is_ascii: bool) -> str:
    return "\n".join(_xml_call(*call) for call in calls)


def _xml_call(name: str, value: dict[str, Any]) -> str:
    texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in value.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


HERMES_FAMILY, MISTRAL_FAMILY = ChatFamily("hermes", "think"), ChatFamily("mistral", "magistral")
DEEPSEEK_FAMILY = ChatFamily("deepseek", "think")
STYLES = {
    "hermes": Style(HERMES_FAMILY, _in(HERMES), _think),
    "qwen-coder": Style(HERMES_FAMILY, _xml, _think),
    "llama3": Style(
        ChatFamily("llama3"), lambda calls, is_ascii: "<|python_tag|>" + _in(LLAMA3)(calls, is_ascii), None
    ),
    "mistral": Style(MISTRAL_FAMILY, _in(MISTRAL), lambda text: f"[THINK]{text}[/THINK]"),
    "mistral-v11": Style(MISTRAL_FAMILY, _in(MISTRAL_V11), lambda text: f"[THINK]{text}[/THINK]"),
    "deepseek-v3": Style(DEEPSEEK_FAMILY, _in(DEEPSEEK_V3), _think),
    "deepseek-v31": Style(DEEPSEEK_FAMILY, _in(DEEPSEEK_V31), _think),
    "gpt-oss": Style(
        ChatFamily("gpt-oss", "gpt-oss"),
        _harmony,
        lambda text: f"<|channel|>analysis<|message|>{text}<|end|>",
        lambda text: f"<|start|>assistant<|channel|>commentary<|message|>{text}<|end|>",
    ),
}
WORDS = ["Let me look.", "a < b & c > d, [x] {y} (z) `w`", "\u00fcber \U0001f680", "1. one\n2. two\n\nthree"]


def good_answers(style: Style) -> Iterator[tuple[str, Answer]]:
    """Texts and what they say, the arguments of calls as JSON."""
    for index, value in enumerate(VALUES):
        yield style.calls([("find", value)], index % 2 == 0), _answer([("find", value)])
        if any(ord(char) > 127 for char in str(value)):
            yield style.calls([("find", value)], index % 2 == 1), _answer([("find", value)])
    several: list[list[Call]] = [
        [("find", VALUES[1]), ("look_up-2.b", {})],
        [("find", {}), ("find", {}), ("find", {})],
        [("look_up-2.b", VALUES[-1]), ("find", VALUES[-2]), ("look_up-2.b", VALUES[9])],
    ]
    for calls in several:
        yield style.calls(calls, False), _answer(calls)
        for words in WORDS:
            yield style.text(words) + style.calls(calls, False), _answer(calls, words)
            if style.reasoning:
                text = style.reasoning(words) + style.text("So:") + style.calls(calls, True)
                yield text, _answer(calls, "So:", words)
    if style.reasoning:
        yield style.reasoning("only"), Answer(reasoning="only")
        yield style.reasoning("hm") + style.calls(several[0], True), _answer(several[0], "", "hm")
        yield style.reasoning("hm") + style.text("yes"), Answer("yes", "hm")


def _answer(calls: Sequence[Call], content: str = "", reasoning: str = "") -> Answer:
    return Answer(content, reasoning, [(name, json.dumps(value)) for name, value in calls])


def broken_answers(style: Style) -> Iterator[str]:
    """A call that is cut off, doubled or spoiled somewhere, behind a text and ahead of one."""
    call = style.calls([("find", BROKEN_VALUE)], False)
    middle = len(call) // 2
    for cut in range(2, len(call), max(1, len(call) // 9)):
        yield f"{style.text('Before.')}{call[:cut]}"
        yield f"{style.text('Before.')}{call[:cut]}{call[cut + 1 :]} after."
    for bad in ("'", '"', "\\", "{", "]", "\n", "NaN", "<", "//", "\x00", "\\u12", "\U0001f600"):
        yield f"{style.text('Before.')}{call[:middle]}{bad}{call[middle:]} after."
    yield call + call
    yield call[middle:] + call[:middle]
    yield call.replace("find", "")
    yield call.replace("find", "f" * 300)
