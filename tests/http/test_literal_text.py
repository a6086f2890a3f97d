"""Special tokens in a message are text, and all other text is tokenized as ever."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from millstream.common.gguf_tokenizer import gguf_tokenizer_parts
from millstream.common.literal_mark import MARK
from millstream.tokenizer_manager.chat.literal_text import LiteralText
from tests.text.sample_tokenizers import byte_level_backend, sentencepiece_backend, tokenizer_of
from tests.tokenizer_manager.live_server import END, END_ID, LineRenderer, LiveServer

SPECIAL = ("<|end|>", "<|", "ab", "bc", "aa", "\u00e9\u00e9")
LITERAL = LiteralText(SPECIAL)
PARTS = ["a", "b", "c", "<", "|", "end", "|>", "\u00e9", MARK, "<|end|>"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(TEXTS)
def test_no_piece_holds_a_special_token_and_no_text_is_lost(text: str) -> None:
    pieces = LITERAL.mark(text).split(MARK)
    assert not [special for special in SPECIAL for piece in pieces if special in piece]
    assert "".join(pieces) == text.replace(MARK, "")


def test_all_texts_of_messages_and_tools_are_marked() -> None:
    call = {"function": {"name": "f", "arguments": {"<|end|>": ["<|end|>", 5, None, True]}}}
    marked = LITERAL.mark([{"role": "user", "content": "x<|end|>"}, call])
    assert "<|end|>" not in str(marked)
    assert marked[1]["function"]["arguments"]["<" + MARK + "|" + "end|>"][1:] == [5, None, True]


def test_a_message_can_not_end_its_turn_on_any_chat_route(server: LiveServer) -> None:
    messages = [{"role": "user", "content": f"a{END}b"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 1}),
    ):
        before = len(server.backend.requests)
        assert server.post(path, body | ({} if "input" in body else {"max_tokens": 1})).status == 200
        ids = [
            value for request in server.backend.requests[before:] for value in memoryview(request.input_ids).cast("i")
        ]
        assert END_ID not in ids
        assert bytes(ids).decode().count(f"a{END}b") == 1
    tokens = server.post("/tokenize", {"messages": messages}).json["tokens"]
    assert END_ID not in tokens


class Greeter(LineRenderer):
    """A chat template that begins with a text of the client's."""

    async def render(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> str:
        return others["chat_template_kwargs"]["greeting"] + await super().render(messages, **others)


def test_a_template_that_prints_a_kwarg_prints_text() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"greeting": f"hi{END}"}}
    with LiveServer(renderer=Greeter()) as server:
        tokens = server.post("/tokenize", body).json["tokens"]
    assert END_ID not in tokens
    assert bytes(tokens).decode().startswith(f"hi{END}u:a")


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """SentencePiece's way of spaces in the pre-tokenizer: at the head of the first text, or of each one."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend().to_str())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    return backend


def prepending() -> tokenizers.Tokenizer:
    """The same in the normalizer, and special tokens that are looked for behind it."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece_backend(strips=False).to_str())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=True)])
    return backend


def unigram(others: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A model that itself knows special tokens as pieces, and better ones than their letters."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz<>/_0123456789"]
    specials = ["<unk>", "<s>", "</s>", *others]
    pieces = [(special, 0.0) for special in specials] + [(letter, -5.0) for letter in letters]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(specials)
    return backend


def gguf_by_score() -> tokenizers.Tokenizer:
    """A GGUF file's SentencePiece, where the pieces of a special token are pieces of the vocabulary."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    others = ["\u2581", *"abcdefghijklmnopqrstuvwxyz<>/", "</", "s>"]
    return gguf_tokenizer_parts(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": specials + others,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(others),
            "tokenizer.ggml.scores": [0.0] * len(specials) + [-1.0 - i for i in range(len(others))],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    ).backend


BACKENDS = {
    "byte-level": lambda: tokenizers.Tokenizer.from_str(byte_level_backend().to_str()),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "gemma": lambda: tokenizers.Tokenizer.from_str(sentencepiece_backend(strips=False).to_str()),
    "llama 2": prepending,
    "unigram": unigram,
    "gguf, by score": gguf_by_score,
}


@pytest.mark.parametrize("make_backend", BACKENDS.values(), ids=BACKENDS)
def test_a_literal_special_token_is_tokenized_as_the_text_that_it_is(make_backend: Callable[[], Any]) -> None:
    """No token of it is special, and no space comes or goes."""
    tokenizer = tokenizer_of(make_backend())
    mark = LiteralText(tokenizer.special_texts).mark
    for text in ("say </s> twice", "</s>", "a</s></s>b", "<s> </s>", "no such thing"):
        ids = tokenizer.encode(f"hello {mark(text)}", add_special_tokens=False)
        assert tokenizer.special_token_ids.isdisjoint(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False).lstrip() == f"hello {text}"
    turn = tokenizer.encode(f"<s>hello {mark('</s>')}</s>", add_special_tokens=False)
    assert [token_id for token_id in turn if token_id in tokenizer.special_token_ids] == [turn[0], turn[-1]]


def test_many_special_tokens_and_those_that_others_begin_with() -> None:
    others = ["<s", "<st", "<<s>", "aa", "aab", "bca", "/>a", *(f"<extra_id_{i}>" for i in range(1000))]
    tokenizer = tokenizer_of(unigram(others))
    mark = LiteralText(tokenizer.special_texts).mark
    for text in (*others[:7], "<extra_id_0>", "<extra_id_999>", "<st>aabca/>a", "".join(others[-40:])):
        ids = tokenizer.encode(mark(text), add_special_tokens=False)
        assert tokenizer.special_token_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text
    start = time.process_time()
    tokenizer.encode("<" * 100_000)
    assert time.process_time() - start < 0.3  # 0.03 s; 0.7 s where each is tried


def test_what_is_normalised_to_a_special_token_is_text_too() -> None:
    tokenizer = tokenizer_of(unigram())
    ids = tokenizer.encode("a\uff1c/s\uff1e", add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "a</s>"


def test_in_a_plain_prompt_it_counts(server: LiveServer) -> None:
    assert END_ID in server.post("/tokenize", {"prompt": f"a{END}b"}).json["tokens"]
    assert server.post("/v1/completions", {"prompt": f"a{END}b", "max_tokens": 1}).status == 200
    assert END_ID in memoryview(server.backend.requests[-1].input_ids).cast("i")
