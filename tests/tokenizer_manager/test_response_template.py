"""A tokenizer's own response template, read by transformers' parser."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.common.config import child_environment
from millstream.common.flags import ConfigError
from millstream.tokenizer_manager.chat.chat_family import find_chat_family
from tests.tokenizer_manager.parsed_answers import HERMES_CALL, PIECES, Answer, read

SPEC = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
FAMILY = find_chat_family({"default": "{{ tools }}"}, "auto", "auto", SPEC)
PROMPT = "<|im_start|>assistant\n"
CALL = ("weather", '{"city":"Bern, \\"BE\\"","days":[1,-2500.0,null],"all":{"x":true}}')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hello,  world. ", Answer("Hello,  world.")),
        (f"<think>\nhm\n</think>\n\nOk.\n{HERMES_CALL}\n{HERMES_CALL}", Answer("Ok.", "hm", [CALL, CALL])),
        ("<think>never ends", Answer(reasoning="never ends")),
        ("So: <tool_call>oops</tool_call> and more", Answer("So:oops</tool_call> and more")),
    ],
)
def test_answers(text: str, answer: Answer) -> None:
    assert read(FAMILY, [text], prompt=PROMPT) == answer
    assert read(FAMILY, text, prompt=PROMPT) == answer


def test_without_tools_calls_are_content() -> None:
    assert read(FAMILY, ["<tool_call>{}</tool_call>"], prompt=PROMPT, tools=[]) == Answer("{}</tool_call>")


def test_reasoning_that_the_prompt_began() -> None:
    assert read(FAMILY, ["hm</think>yes"], prompt=PROMPT + "<think>\n") == Answer("yes", "hm")


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_text_cut_in_any_way(text: str, cuts: list[int]) -> None:
    whole = read(FAMILY, [text], prompt=PROMPT)
    assert read(FAMILY, text, prompt=PROMPT) == whole
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(text)])]
    assert read(FAMILY, pieces, prompt=PROMPT) == whole


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="response_template"):
        find_chat_family({"default": "{{ tools }}"}, "auto", "auto", {"fields": {}})


def test_no_torch_is_loaded() -> None:
    code = "import sys; import millstream.tokenizer_manager.chat.response_template; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=child_environment(), check=True, timeout=60)
