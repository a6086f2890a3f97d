"""Which log-probabilities come with which text, however an answer's outputs are cut and merged."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from millstream.common.incremental_decoder import make_decoder
from millstream.common.logprobs import LogprobReq, TokenLogprobs
from millstream.common.messages import pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import StrOutput
from millstream.common.token_bytes import TokenBytes
from millstream.common.tokenizer import Tokenizer
from millstream.tokenizer_manager.call import Call
from millstream.tokenizer_manager.chat import chat_generation
from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.chat_generation import ChatGeneration
from millstream.tokenizer_manager.chat.delta import ChatMessageSum, Delta, PlainParser
from millstream.tokenizer_manager.chat.delta_blocks import Block, BlockKind, DeltaBlocks
from millstream.tokenizer_manager.chat.delta_logprobs import DeltaLogprobs
from millstream.tokenizer_manager.req_state import Generation, ReqState
from tests.text.sample_tokenizers import metaspace_backend, tokenizer_of
from tests.tokenizer_manager.live_server import END, END_ID, byte_tokenizer
from tests.tokenizer_manager.parsed_answers import FAMILIES, PIECES, TOOLS
from tests.tokenizer_manager.test_response_template import FAMILY as RESPONSE_TEMPLATE

TOKENIZER = byte_tokenizer()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
READERS = {**FAMILIES, "plain": ChatFamily(), "response template": RESPONSE_TEMPLATE}


def places_of(
    tokenizer: Tokenizer, context_ids: Sequence[int] = (), *, skip_special_tokens: bool = False
) -> DeltaLogprobs:
    return DeltaLogprobs(make_decoder(tokenizer, context_ids, skip_special_tokens=skip_special_tokens))


def deltas_of(family: ChatFamily, text: str, cuts: Sequence[int], held: int) -> list[Delta]:
    """The text in outputs that end at these cuts; each byte is a token, which may come `held` characters early."""
    parser, places = family.parser(TOOLS, ""), places_of(TOKENIZER)
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
    places = places_of(TOKENIZER, skip_special_tokens=True)
    token_ids = [*b"hm>", END_ID, *"\u00e9!".encode(), END_ID]
    places.add(token_ids, [{"token": name} for name in ["h", "m", ">", "hidden", "half", "char", "!", "end"]])
    deltas = [Delta(reasoning="hm", end=2), Delta(content="\u00e9", end=4), Delta(content="!", end=5)]
    assert placed(places, deltas) == [["h", "m"], [">"], ["hidden", "half", "char"], ["!"], ["end"]]
    places = places_of(TOKENIZER)
    places.add([END_ID, 97], [{"token": END}, {"token": "a"}])
    content = Delta(content="a", end=len(END) + 1)
    assert placed(places, [msgspec.structs.replace(content, content=">a")]) == [[END, "a"]]


def test_tokens_whose_text_depends_on_the_one_ahead() -> None:
    tokenizer = tokenizer_of(metaspace_backend())
    assert tokenizer.token_bytes is None
    token_ids = tokenizer.encode("hello world two three", False)
    places = places_of(tokenizer, token_ids[:1])
    outputs = token_ids[1:]
    text = tokenizer.decode(token_ids).removeprefix(tokenizer.decode(token_ids[:1]))
    places.add(outputs, [{"token": tokenizer.bytes_of(token_id).decode()} for token_id in outputs])
    cut = text.index(" three")
    tokens = placed(places, [Delta(reasoning=text[:cut], end=cut), Delta(content=text[cut:], end=len(text))])
    assert "".join(tokens[1]) == "three"


def byte_fallback(*steps: Any) -> Tokenizer:
    """Characters of more than one byte are byte tokens, and the decoder does more than join bytes."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256)), *((each, -5.0) for each in letters)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Sequence(list(steps))
    return tokenizer_of(backend)


JOINED_BYTES = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())


@pytest.mark.parametrize(
    ("steps", "num_context"),
    [
        ((decoders.ByteFallback(), decoders.Metaspace()), 2),
        ((decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()), 2),
        (JOINED_BYTES, 2),
        (JOINED_BYTES, 6),
    ],
    ids=["metaspace", "fused", "joined bytes", "half a character in the prompt"],
)
def test_a_character_of_several_tokens_counts_once(steps: tuple[Any, ...], num_context: int) -> None:
    tokenizer = byte_fallback(*steps)
    token_ids = tokenizer.encode("a\u20ac\u20ac\U0001f600 cd", False)
    context, outputs = token_ids[:num_context], token_ids[num_context:]
    text = "".join(map(make_decoder(tokenizer, context, skip_special_tokens=False).feed, outputs))
    assert text.replace(" ", "") == "\u20ac\u20ac\U0001f600cd"[num_context == 6 :]
    places = places_of(tokenizer, context)
    places.add(outputs, [{"token": token_id} for token_id in outputs])
    cut = len(text) - 1
    found = places.place([Delta(content=text[:cut], end=cut), Delta(content=text[cut:], end=len(text))], is_last=True)
    tokens = [[entry["token"] for entry in delta.logprobs or ()] for delta in found]
    assert tokens == [outputs[:-1], outputs[-1:]]


class WatchedBytes(TokenBytes):
    """Notes who looks at tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.strips_first_space = token_bytes.strips_first_space
        self._token_bytes = token_bytes
        self.threads: set[threading.Thread] = set()

    def __getitem__(self, token_id: int) -> bytes:
        self.threads.add(threading.current_thread())
        return self._token_bytes[token_id]


def test_many_tokens_are_looked_at_in_one_thread_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes is not None
    tokenizer.token_bytes = watched = WatchedBytes(tokenizer.token_bytes)
    req = ReqState(Call(0.0, "call"), "call", None, index=0, prompt_len=1, stream=False)
    req.wanted_logprobs, req.prompt_ids = LogprobReq(), [97]

    async def threads_of(generation: Generation) -> set[threading.Thread]:
        chat = ChatGeneration(generation, [PlainParser()], tokenizer, SamplingParams())
        req.put(StrOutput("call", "hello", pack_int32([*b"hello"]), logprobs=TokenLogprobs(bytes(20))))
        generation.notify(req)
        watched.threads.clear()
        _, (delta,), _ = await chat.next()
        assert [entry["token"] for entry in delta.logprobs or ()] == list("hello")
        return watched.threads

    generation = Generation(None, [req], [])
    assert asyncio.run(threads_of(generation)) == {threading.current_thread()}
    monkeypatch.setattr(chat_generation, "MANY_LOGPROBS", 4)
    (thread,) = asyncio.run(threads_of(generation))
    assert thread is not threading.current_thread()
