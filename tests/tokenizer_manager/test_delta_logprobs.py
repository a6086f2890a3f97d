"""Which log-probabilities come with which text, however an answer's outputs are cut and merged."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.delta import ChatMessageSum, Delta
from millstream.tokenizer_manager.chat.delta_blocks import Block, BlockKind, DeltaBlocks
from millstream.tokenizer_manager.chat.delta_logprobs import DeltaLogprobs
from tests.text.sample_tokenizers import metaspace_backend, tokenizer_of
from tests.tokenizer_manager.live_server import END, END_ID, byte_tokenizer
from tests.tokenizer_manager.parsed_answers import FAMILIES, PIECES, TOOLS
from tests.tokenizer_manager.test_response_template import FAMILY as RESPONSE_TEMPLATE

TOKENIZER = byte_tokenizer()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
READERS = {**FAMILIES, "plain": ChatFamily(), "response template": RESPONSE_TEMPLATE}


def deltas_of(family: ChatFamily, text: str, cuts: Sequence[int], held: int) -> list[Delta]:
    """The text in outputs that end at these cuts; each byte is a token, which may come `held` characters early."""
    parser, places = family.parser(TOOLS, ""), DeltaLogprobs(TOKENIZER, [], frozenset())
    token_ids, num_tokens, num_chars = list(text.encode()), 0, 0
    deltas: list[Delta] = []
    for cut in [*sorted(cuts), len(text)]:
        is_last = cut == len(text)
        last_token = len(text[: cut + held].encode())
        new_ids = token_ids[num_tokens:last_token]
        places.add(new_ids, [{"token": token_id} for token_id in new_ids])
        num_tokens += len(new_ids)
        found = parser.feed(text[num_chars:cut])
        num_chars = max(cut, num_chars)
        deltas += places.place(found + parser.finish() if is_last else found, is_last=is_last)
        if is_last:
            break
    return deltas


def blocks_of(deltas: Sequence[Delta]) -> list[Block]:
    found = DeltaBlocks()
    found.add(deltas)
    found.finish()
    return found.blocks


def shown(blocks: Sequence[Block]) -> list[Any]:
    return [(block.kind, block.text, block.logprobs) for block in blocks]


@pytest.mark.parametrize("family", READERS.values(), ids=READERS)
@settings(max_examples=40, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=8), st.integers(0, 9))
def test_a_text_has_those_of_its_own_tokens(family: ChatFamily, text: str, cuts: list[int], held: int) -> None:
    whole, cut = deltas_of(family, text, [], 0), deltas_of(family, text, cuts, held)
    assert shown(blocks_of(cut)) == shown(blocks_of(whole))
    assert shown(blocks_of(deltas_of(family, text, range(len(text)), held))) == shown(blocks_of(whole))
    for deltas in (whole, cut):
        message = ChatMessageSum()
        message.add(deltas)
        assert [entry["token"] for entry in message.logprobs or ()] == list(text.encode())
    for block in blocks_of(whole):
        ids = [entry["token"] for entry in block.logprobs]
        assert bytes(ids) == (block.text.encode() if block.kind is BlockKind.TEXT else b"")


def placed(places: DeltaLogprobs, deltas: Sequence[Delta]) -> list[list[str]]:
    """The tokens of each delta."""
    found = places.place(deltas, is_last=True)
    return [[entry["token"] for entry in delta.logprobs or ()] for delta in found]


def test_a_token_that_only_ends_in_a_text_is_of_that_text() -> None:
    places = DeltaLogprobs(TOKENIZER, [], frozenset({END_ID}))
    token_ids = [*b"hm>", END_ID, *"\u00e9!".encode(), END_ID]
    places.add(token_ids, [{"token": name} for name in ["h", "m", ">", "hidden", "half", "char", "!", "end"]])
    deltas = [Delta(reasoning="hm", end=2), Delta(content="\u00e9", end=4), Delta(content="!", end=5)]
    assert placed(places, deltas) == [["h", "m"], [">"], ["hidden", "half", "char"], ["!"], ["end"]]
    places = DeltaLogprobs(TOKENIZER, [], frozenset())
    places.add([END_ID, 97], [{"token": END}, {"token": "a"}])
    content = Delta(content="a", end=len(END) + 1)
    assert placed(places, [msgspec.structs.replace(content, content=">a")]) == [[END, "a"]]


def test_tokens_whose_text_depends_on_the_one_ahead() -> None:
    tokenizer = tokenizer_of(metaspace_backend())
    assert tokenizer.token_bytes is None
    token_ids = tokenizer.encode("hello world two three", False)
    places = DeltaLogprobs(tokenizer, token_ids[:1], frozenset())
    outputs = token_ids[1:]
    text = tokenizer.decode(token_ids).removeprefix(tokenizer.decode(token_ids[:1]))
    places.add(outputs, [{"token": tokenizer.bytes_of(token_id).decode()} for token_id in outputs])
    cut = text.index(" three")
    tokens = placed(places, [Delta(reasoning=text[:cut], end=cut), Delta(content=text[cut:], end=len(text))])
    assert "".join(tokens[1]) == "three"
