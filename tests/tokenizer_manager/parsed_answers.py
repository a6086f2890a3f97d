"""Texts that models write, and what is to be read out of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.delta import ChatMessageSum
from millstream.tokenizer_manager.chat.tool_format import DEEPSEEK_V3, DEEPSEEK_V31, deepseek_tag

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "boolean"}},
            },
        },
    }
    for name in ("weather", "time")
]


@dataclass
class Answer:
    """An answer as a client gets it; of calls the names and the arguments' text."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def read(family: ChatFamily, pieces: Iterable[str], *, prompt: str = "", tools: Sequence[Any] = TOOLS) -> Answer:
    """What the family's parser makes of a text that comes in these pieces."""
    parser = family.parser(tools, prompt)
    message = ChatMessageSum()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    ids = [call.id for call in message.tool_calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return Answer(message.content, message.reasoning, calls)


ARGUMENTS = '{"city": "Bern, \\"BE\\"", "days": [1, -2.5e3, null], "all": {"x": true}}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CODER_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=all>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
HARMONY_RECIPIENT_FIRST = "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>"
BOTH = [("weather", ARGUMENTS), ("time", "{}")]

FAMILIES = {
    "hermes": ChatFamily("hermes", "think"),
    "llama3": ChatFamily("llama3"),
    "mistral": ChatFamily("mistral", "magistral"),
    "deepseek": ChatFamily("deepseek", "deepseek-r1"),
    "gpt-oss": ChatFamily("gpt-oss", "gpt-oss"),
}
DEEPSEEK_BOTH = {
    layout: layout.begin
    + layout.separator.join([layout.write("weather", ARGUMENTS), layout.write("time", "{}")])
    + layout.end
    for layout in (DEEPSEEK_V3, DEEPSEEK_V31)
}

GOLDENS: list[tuple[str, str, Answer]] = [
    ("hermes", "Hello, world.\n", Answer("Hello, world.\n")),
    ("hermes", f"Let me see.\n{HERMES_CALL}", Answer("Let me see.", calls=BOTH[:1])),
    (
        "hermes",
        f'<think>\nhm\n</think>\n\n{HERMES_CALL}\n<tool_call>{{"arguments": {{}}, "name": "time"}}</tool_call>\n',
        Answer(reasoning="hm", calls=BOTH),
    ),
    ("hermes", CODER_CALL, Answer(calls=[("weather", '{"city": "Bern", "days": 3, "all": true}')])),
    (
        "hermes",
        '<tool_call>\n<function=time>\n<parameter=city>\n\nSt. "Gallen"\n\n</parameter>\n<parameter=x>cut off',
        Answer(calls=[("time", '{"city": "\\nSt. \\"Gallen\\"\\n", "x": "cut off')]),
    ),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', Answer(calls=[("time", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=[("time", '{"a": 1}')]),
    ),
    ("hermes", "<think>never ends", Answer(reasoning="never ends")),
    ("hermes", "I think <think> is a tag", Answer("I think <think> is a tag")),
    ("hermes", "<tool_call>no</tool_call>", Answer("<tool_call>no</tool_call>")),
    ("hermes", "a < b, a <tool b", Answer("a < b, a <tool b")),
    ("hermes", '<tool_call>{"name": "time", "ar', Answer('<tool_call>{"name": "time", "ar')),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": oops}}</tool_call>',
        Answer("oops}}</tool_call>", calls=[("time", '{"a": ')]),
    ),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"a": "b', Answer(calls=[("time", '{"a": "b')])),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}', Answer(calls=[("time", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": "1\n\t\\d\\u12 \\u00e9"}}</tool_call>',
        Answer(calls=[("time", '{"a": "1\\u000a\\u0009\\\\d\\\\u12 \\u00e9"}')]),
    ),
    ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', Answer(calls=BOTH[:1])),
    (
        "llama3",
        f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "time", "parameters": {{}}}}',
        Answer(calls=BOTH),
    ),
    ("llama3", '{"answer": 42} is JSON', Answer('{"answer": 42} is JSON')),
    ("llama3", 'Like {"name": "time"}', Answer('Like {"name": "time"}')),
    (
        "mistral",
        f'Sure. [TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time", "arguments": {{}}}}]',
        Answer("Sure.", calls=BOTH),
    ),
    (
        "mistral",
        f"[THINK]hm[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{{}}",
        Answer(reasoning="hm", calls=BOTH),
    ),
    ("mistral", "[TOOL_CALLS] nothing", Answer("[TOOL_CALLS] nothing")),
    ("deepseek", f"hm\n</think>\n\nOk.{DEEPSEEK_BOTH[DEEPSEEK_V3]}", Answer("Ok.", "hm", BOTH)),
    ("deepseek", f"<think>\nhm</think>{DEEPSEEK_BOTH[DEEPSEEK_V31]}", Answer(reasoning="hm", calls=BOTH)),
    (
        "deepseek",
        f"</think>{deepseek_tag('tool call begin')}time",
        Answer(f"{deepseek_tag('tool call begin')}time"),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        Answer("Yes.", "hm"),
    ),
    (
        "gpt-oss",
        f"<|channel|>analysis<|message|>hm<|end|>{HARMONY_CALL}{ARGUMENTS}<|call|>",
        Answer("", "hm", BOTH[:1]),
    ),
    (
        "gpt-oss",
        f"<|channel|>commentary<|message|>First,<|end|>{HARMONY_RECIPIENT_FIRST}{{}}<|call|>",
        Answer("First,", calls=BOTH[1:]),
    ),
    ("gpt-oss", "plain", Answer("plain")),
]

PIECES = [  # what random texts are made of
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=time>", "</function>"),
    *("<parameter=city>", "</parameter>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ";", ","),
    *(deepseek_tag(f"tool {words}") for words in ("calls begin", "calls end", "call begin", "call end", "sep")),
    *("```json", "```", "function", "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>"),
    *("analysis", "final", "commentary to=functions.time ", "<|constrain|>json", HERMES_CALL, CODER_CALL),
    *('{"name": "time"', ', "arguments": ', ', "parameters": ', ARGUMENTS, "{}", "{", "}", '"', "\\", "\\u00e9", ":"),
    *('"a": 1', "null", "-1.5e", "text ", " ", "\n", "  \n", " " * 70, "<", "<|", "[TOOL", "\u00e9\U0001f600"),
    *DEEPSEEK_BOTH.values(),
]
