"""What is read out of a model's text does not depend on how the text is cut, and nothing of it is lost."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.delta import ChatMessageSum
from millstream.tokenizer_manager.chat.tool_format import DEEPSEEK_OPEN
from tests.tokenizer_manager.parsed_answers import FAMILIES, GOLDENS, PIECES, TOOLS, Answer, read

TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(("family", "text", "answer"), GOLDENS, ids=range(len(GOLDENS)))
def test_answers(family: str, text: str, answer: Answer) -> None:
    """At every pair of cuts, and character by character."""
    assert read(FAMILIES[family], [text]) == answer
    assert read(FAMILIES[family], text) == answer
    for first in range(0, len(text), 3):
        for second in range(first, len(text), 17):
            assert read(FAMILIES[family], [text[:first], text[first:second], text[second:]]) == answer


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_forced_calls_that_are_cut_off_leave_no_content(family: ChatFamily) -> None:
    """What has begun of the last one is a call with what there is of its arguments, or nothing."""
    text = family.forced_format.write_all([("weather", '{"city": "Bern"}'), ("time", "{}")])
    for size in range(len(text) + 1):
        message, parser = ChatMessageSum(), family.parser(TOOLS, "", is_bound=True, content_goes="nowhere")
        message.add(parser.feed(text[:size]) + parser.finish())
        assert not message.content
        for call, arguments in zip(message.tool_calls, ('{"city": "Bern"}', "{}"), strict=False):
            assert arguments.startswith(call.arguments)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_text_cut_in_any_way(family: ChatFamily, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    whole = read(family, [text])
    assert read(family, text) == whole
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert read(family, pieces) == whole


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@given(text=TEXTS)
def test_no_word_is_lost(family: ChatFamily, text: str) -> None:
    """A word comes out as content, reasoning, or in a call, unless it stands where only syntax may."""
    marked = f"{text} unmistakable"
    answer = read(family, [marked])
    everywhere = [answer.content, answer.reasoning, *(text for call in answer.calls for text in call)]
    assert any("unmistakable" in text for text in everywhere) or answer.calls


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_without_tools_calls_are_text(family: ChatFamily) -> None:
    text = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    prompt_that_thinks = read(
        family, [f"</think>{text}"] if family.reasoning_parser == "deepseek-r1" else [text], tools=[]
    )
    assert prompt_that_thinks == Answer(text)


def test_reasoning_that_the_prompt_began() -> None:
    family = ChatFamily("hermes", "think")
    assert read(family, ["hm</think>yes"], prompt="<|im_start|>assistant\n<think>\n") == Answer("yes", "hm")
    assert read(family, ["yes"], prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n") == Answer("yes")


def test_reasoning_that_the_prompt_has_closed() -> None:
    family = FAMILIES["deepseek"]
    assert read(family, ["hm</think>yes"], prompt="<\uff5cAssistant\uff5c>") == Answer("yes", "hm")
    assert read(family, ["yes"], prompt="<\uff5cAssistant\uff5c></think>\n") == Answer("yes")


def test_reasoning_can_stay_in_the_content() -> None:
    parser = FAMILIES["hermes"].parser([], "", separates=False)
    assert [delta.content for delta in parser.feed("<think>hm</think>yes")] == ["<think>hm</think>yes"]


def test_arguments_stream_as_they_come() -> None:
    parser = FAMILIES["hermes"].parser(TOOLS, "")
    parser.feed('<tool_call>\n{"name": "weather", "arguments": ')
    pieces = [parser.feed(piece)[0].tool_calls[0].arguments for piece in ('{"ci', 'ty": "Be', 'rn"}')]
    assert json.loads("".join(pieces)) == {"city": "Bern"}


ENDLESS = {  # tags of which others, that never come, are looked for ahead of each
    "hermes": ("<tool_call><function=time>", "<parameter=city>x</parameter>"),
    "llama3": ("", '<|python_tag|>{"name": "time"'),
    "mistral": ("", "[TOOL_CALLS]time[ARGS]{}"),
    "deepseek": ("</think>", DEEPSEEK_OPEN),
    "gpt-oss": ("", "<|channel|>analysis<|message|>x<|end|>"),
}


@pytest.mark.parametrize("family", ENDLESS)
def test_cost_of_a_whole_answer_is_linear(family: str) -> None:
    """As an answer that is not streamed comes: all at once, 20,000 tags of it."""
    parser = FAMILIES[family].parser(TOOLS, "")
    start, unit = ENDLESS[family]
    started = time.process_time()
    parser.feed(start + unit * 20_000)
    parser.finish()
    assert time.process_time() - started < 1.2


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("unit", ["[a(a(a(", "<", "[TOOL_CALLS] [", "<tool_call>{", '{"name":', " ", "<tool_call>\n\n"])
def test_cost_is_linear(family: ChatFamily, unit: str) -> None:
    """Text that never ends what it begins, piece by piece: 50 ms for each is far off."""
    parser = family.parser(TOOLS, "")
    started = time.process_time()
    for _ in range(3000):
        parser.feed(unit)
    parser.finish()
    assert time.process_time() - started < 3.0
