"""Many answers of each family: what is read out of them, and that it does not depend on how they are cut."""

import json
import random
import re

import pytest

from tests.tokenizer_manager.golden_answers import BROKEN_VALUE, STYLES, TOOLS, Style, broken_answers, good_answers
from tests.tokenizer_manager.parsed_answers import Answer, read


def pieces(text: str, seed: int) -> list[str]:
    """The text cut at random places."""
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.choice([2, 9, 40])))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_in_all_ways(style: Style, text: str) -> Answer:
    """Whole, character by character and at random cuts: always the same."""
    whole = read(style.family, [text], tools=TOOLS)
    assert read(style.family, text, tools=TOOLS) == whole
    assert read(style.family, pieces(text, len(text)), tools=TOOLS) == whole
    return whole


def values(answer: Answer) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text))


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_good_answers(style: Style) -> None:
    answers = list(good_answers(style))
    assert len(answers) >= 50
    for text, expected in answers:
        answer = read_in_all_ways(style, text)
        assert (answer.content, answer.reasoning) == (expected.content, expected.reasoning), text
        assert values(answer) == values(expected), text


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_broken_answers(style: Style) -> None:
    """What comes ahead is content, and what comes behind is that too, or stands in the call that has not ended.

    Where no call was begun its arguments are content.
    """
    argument_words = words(json.dumps(BROKEN_VALUE))
    for text in broken_answers(style):
        answer = read_in_all_ways(style, text)
        if "Before." in text:
            assert answer.content.startswith("Before."), text
        arguments = "".join(arguments for _, arguments in answer.calls)
        assert "after." not in text or "after." in answer.content + arguments, text
        assert answer.calls or words(text) & argument_words <= words(answer.content), text
