"""Tokenizers for tests: the packaged model's, and small ones trained on the spot."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from millstream.common.model_path import find_model
from millstream.common.tokenizer import Tokenizer, load_tokenizer
from millstream.common.tokenizer_parts import TokenizerParts

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 12 times in 2024; isn't it 3.14159 fun?",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nclass Tree:\n\tpass\n",
    "Gr\u00fc\u00dfe aus K\u00f6ln! \u00c7a va? \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439\u0442\u0435 \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "hello hello hello world world  two  spaces   three    four",
] * 3

TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "a",
    " leading and trailing ",
    "   12 and  3  and 4567 12,345.678",
    "line\n\n\nline\r\n\ttab \u00a0nbsp\u2003em",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 flag \U0001f1e9\U0001f1ea e\u0301 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0645\u0631\u062d\u0628\u0627 \ud55c\uad6d\uc5b4 \u00b2\u00bd\u2167",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end|x> <s>[INST] </s>",
    "WE'LL I'm they'd don't O'Neill x'S",
    "\x00\x01\x7f\u200b\ufeff\ufffd",
    'https://example.com/a?b=c&d=%20#frag {"json": [1, 2.5e-3, null]}',
    "antidisestablishmentarianism" * 3,
]  # fmt: skip


@cache
def smollm2() -> Tokenizer:
    """The packaged model's tokenizer, from its GGUF file."""
    return load_tokenizer(find_model("smollm2"))


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """A small byte-level BPE with two special tokens and a plain added one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>"])
    return backend


@cache
def sentencepiece_backend(*, strips: bool = True) -> tokenizers.Tokenizer:
    """A small BPE in SentencePiece's manner: byte fallback, U+2581 for spaces, as Llama (strips) or Gemma."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    trained.train_from_iterator(
        ["".join(c for c in text if ord(c) < 0x100) for text in CORPUS],
        trainers.BpeTrainer(vocab_size=300, special_tokens=pieces, show_progress=False, max_token_length=8),
    )
    state = json.loads(trained.to_str())["model"]
    model = models.BPE(
        vocab=state["vocab"],
        merges=[tuple(merge) for merge in state["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    return backend


@cache
def metaspace_backend() -> tokenizers.Tokenizer:
    """A Unigram tokenizer whose decoder is Metaspace: text that no joining of bytes gives."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    """Our tokenizer over a backend."""
    parts = TokenizerParts(backend, {"bos_token": "<s>", "eos_token": "</s>"}, [2], {})
    return Tokenizer(parts)


def write_directory(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A model directory's tokenizer files."""
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(body))
    return directory


def write_gguf(path: Path, architecture: str, **fields: Any) -> Path:
    """A GGUF file with no tensors, and with `tokenizer.ggml.*` fields (a name with dots is whole)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in fields.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def bpe_columns(backend: tokenizers.Tokenizer) -> dict[str, list[Any]]:
    """Tokens, types and merges of a backend as GGUF arrays."""
    state = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(token_id) or "" for token_id in range(backend.get_vocab_size())]
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    return {"tokens": tokens, "token_type": types, "merges": [" ".join(merge) for merge in state["merges"]]}
