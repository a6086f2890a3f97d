"""Our tokenizers against transformers', from the same files."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from millstream.common.tokenizer import load_tokenizer
from tests.text.sample_tokenizers import (
    TEXTS,
    bpe_columns,
    byte_level_backend,
    sentencepiece_backend,
    smollm2,
    write_directory,
    write_gguf,
)
from tests.text.transformers_oracle import transformers_smollm2, transformers_tokenizer


@cache
def known_bytes() -> frozenset[int]:
    """The bytes that are tokens (SmolLM2 lacks some rare ones)."""
    tokens = smollm2().token_bytes
    assert tokens is not None
    return frozenset(tokens[i][0] for i in range(smollm2().vocab_size) if len(tokens[i]) == 1)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_encodes_and_decodes_as_transformers_does_but_for_digits(text: str) -> None:
    ours, theirs = smollm2(), transformers_smollm2()
    if not any(character.isnumeric() for character in text):
        assert ours.encode(text) == theirs.encode(text)
    ids = ours.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_cuts_every_digit_out_as_the_model_was_trained(text: str) -> None:
    """transformers reads no pre-tokenizer from this file; with the model's own put back it agrees everywhere."""
    theirs = transformers_smollm2()
    backend = type(theirs.backend_tokenizer).from_str(theirs.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert smollm2().encode(text) == backend.encode(text).ids


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_smollm2_decodes_any_ids_as_transformers_does(ids: list[int], skip: bool) -> None:
    assert smollm2().decode(ids, skip) == transformers_smollm2().decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_smollm2_gives_back_any_text_whose_bytes_it_has(text: str) -> None:
    assume(known_bytes().issuperset(text.encode()))
    assert smollm2().decode(smollm2().encode(text), skip_special_tokens=False) == text


def test_every_single_token_of_smollm2_decodes_as_transformers_does() -> None:
    ours, theirs = smollm2(), transformers_smollm2()
    ids = range(ours.vocab_size)
    for skip in (True, False):
        expected = theirs.backend_tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=skip)
        assert [ours.decode([i], skip) for i in ids] == expected


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_a_directory_encodes_and_decodes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    backend = byte_level_backend() if kind == "byte_level" else sentencepiece_backend(strips=kind == "llama")
    path = write_directory(tmp_path, backend)
    ours, theirs = load_tokenizer(path), transformers_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_a_byte_level_gguf_encodes_as_transformers_does(pre: str, tmp_path: Path) -> None:
    columns = bpe_columns(byte_level_backend())
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        model="gpt2",
        pre=pre,
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=pre == "llama-bpe",
        **columns,
    )
    from transformers import AutoTokenizer

    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    assert ours.add_bos == (pre == "llama-bpe")
    for text in TEXTS:
        if "<|endoftext|>" in text:  # transformers adds GPT-2's to every vocabulary
            continue
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_sentencepiece_gguf_encodes_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    columns = bpe_columns(sentencepiece_backend(strips=architecture == "llama"))
    del columns["merges"]
    count = len(columns["tokens"])
    columns["token_type"] = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(count - 259)]
    path = write_gguf(
        tmp_path / "m.gguf",
        architecture,
        model="llama",
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **columns,
    )
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    assert ours.add_bos
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
