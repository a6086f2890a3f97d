"""Answers as blocks, however their deltas are cut; and JSON objects that were cut off."""

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.tokenizer_manager.chat.delta import Delta, ToolCallDelta
from millstream.tokenizer_manager.chat.delta_blocks import BlockKind, DeltaBlocks, Step
from millstream.tokenizer_manager.chat.partial_json import parse_object

Piece = tuple[BlockKind, str]
PIECES = st.lists(st.tuples(st.sampled_from(BlockKind), st.text("ab", max_size=4)), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\é,{', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"', max_size=2), inner, max_size=3),
    max_leaves=12,
)


def deltas_of(pieces: list[Piece], sizes: list[int]) -> list[Delta]:
    """The pieces as deltas, each piece cut into texts of these sizes in turn; every tool call is one of its own."""
    deltas = []
    num_calls = 0
    for number, (kind, text) in enumerate(pieces):
        size = sizes[number % len(sizes)]
        texts = [text[at : at + size] for at in range(0, len(text), size)]
        match kind:
            case BlockKind.TEXT:
                deltas += [Delta(content=part) for part in texts]
            case BlockKind.REASONING:
                deltas += [Delta(reasoning=part) for part in texts]
            case BlockKind.TOOL_CALL:
                deltas.append(Delta(tool_calls=[ToolCallDelta(num_calls, f"c{num_calls}", "f")]))
                deltas += [Delta(tool_calls=[ToolCallDelta(num_calls, arguments=part)]) for part in texts]
                num_calls += 1
    return deltas


def expected_blocks(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring texts of one kind are one block, empty ones none, and every call is a block."""
    blocks: list[Piece] = []
    for kind, text in pieces:
        if kind is not BlockKind.TOOL_CALL and blocks and blocks[-1][0] is kind:
            blocks[-1] = (kind, blocks[-1][1] + text)
        elif text or kind is BlockKind.TOOL_CALL:
            blocks.append((kind, text))
    return blocks


@given(PIECES, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4))
def test_the_blocks_do_not_depend_on_how_deltas_are_cut(pieces: list[Piece], sizes: list[int], batch: int) -> None:
    found, deltas = DeltaBlocks(), deltas_of(pieces, sizes)
    changes = [change for at in range(0, len(deltas), batch) for change in found.add(deltas[at : at + batch])]
    changes += found.finish()
    assert [(block.kind, block.text) for block in found.blocks] == expected_blocks(pieces)
    assert found.finish() == []
    for block in found.blocks:
        steps = [step for step, changed, _ in changes if changed is block]
        assert (steps[0], steps[-1]) == (Step.STARTED, Step.DONE)
        assert set(steps[1:-1]) <= {Step.GREW}
        assert "".join(text for _, changed, text in changes if changed is block) == block.text
    assert [changed.index for _, changed, _ in changes] == sorted(changed.index for _, changed, _ in changes)


def test_texts_have_the_log_probabilities_of_their_tokens() -> None:
    """Those that come with reasoning, calls or nothing are in no block."""
    a, b, c, d, e, f = [{"token": letter} for letter in "abcdef"]
    found = DeltaBlocks()
    found.add([Delta(reasoning="hm", logprobs=[a])])
    found.add([Delta(logprobs=[b])])
    found.add([Delta(content="So", logprobs=[c])])
    found.add([Delta(tool_calls=[ToolCallDelta(0, "c0", "f")], logprobs=[d])])
    found.add([Delta(content="yes", logprobs=[e]), Delta(content="!")])
    found.add([Delta(logprobs=[f])])
    found.finish()
    assert [block.logprobs for block in found.blocks] == [[], [c], [], [e]]


@given(
    st.dictionaries(st.text("ab", max_size=3), VALUES, max_size=3), st.sampled_from([None, (" ,", " : ")]), st.data()
)
def test_an_object_that_was_cut_off_keeps_what_is_whole(value: Any, separators: Any, data: st.DataObject) -> None:
    """As jiter, with which Anthropic's client puts a stream of arguments together."""
    text = json.dumps(value, separators=separators, ensure_ascii=data.draw(st.booleans()))
    assert parse_object(text) == value
    prefix = text[: data.draw(st.integers(1, len(text)))]
    assert parse_object(prefix) == jiter.from_json(prefix.encode(), partial_mode=True)


@pytest.mark.parametrize(
    "text", ["", "x", "[1]", '"a"', "{]", '{"a" 1', "null", '{"a":' * 5000, '{"a":' + "[" * 200_000]
)
def test_what_is_no_object_is_an_empty_one_or_the_part_that_is(text: str) -> None:
    assert isinstance(parse_object(text), dict)
