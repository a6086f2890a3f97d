"""What tokenizer files hold, what is refused, and what loading costs."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millstream.common.config import child_environment
from millstream.common.model_error import ModelError
from millstream.common.model_path import find_model
from millstream.common.tokenizer import TokenizerError, load_tokenizer
from tests.text.sample_tokenizers import (
    TEXTS,
    bpe_columns,
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    smollm2,
    tokenizer_of,
    write_directory,
    write_gguf,
)

LOAD_SECONDS = 0.3 * 3

TEMPLATES = {"tokenizer.chat_template": "T", "tokenizer.chat_template.tool_use": "U"}

LOAD = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from millstream.common.tokenizer import load_tokenizer
load_tokenizer(Path(sys.argv[1]))
print(time.perf_counter() - start, "torch" in sys.modules, "transformers" in sys.modules)
"""


def gguf_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **bpe_columns(byte_level_backend()),
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def test_smollm2_says_what_its_file_says() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert not tokenizer.add_bos
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (tokenizer.chat_template or "")
    assert tokenizer.token_to_id("<|im_end|>") == 2


def test_smollm2_loads_fast_and_without_torch_or_transformers() -> None:
    command = [sys.executable, "-c", LOAD, str(find_model("smollm2"))]
    lines = [subprocess.check_output(command, env=child_environment(), text=True) for _ in range(2)]
    seconds, torch, transformers = min(line.split() for line in lines)
    assert (torch, transformers) == ("False", "False")
    assert float(seconds) < LOAD_SECONDS


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, text = smollm2(), "some words and 123 numbers " * 40_000
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    worker.start()
    ticks, longest, last = 0, 0.0, time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        ticks, longest, last = ticks + 1, max(longest, time.perf_counter() - last), time.perf_counter()
    assert ticks > 20
    assert longest < 0.5


def test_encode_batch_is_encode_of_each() -> None:
    tokenizer = smollm2()
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_a_lone_surrogate_is_refused_by_its_place() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at position 2"):
        smollm2().encode("ab\ud800")


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    for wrong in (-1, 49152, 2**40):
        assert smollm2().decode([wrong]) == ""


@pytest.mark.parametrize("strips", [True, False])
def test_text_of_byte_tokens_is_transformers_text_wherever_it_is_valid(strips: bool) -> None:
    backend = sentencepiece_backend(strips=strips)
    tokenizer = tokenizer_of(backend)
    assert tokenizer.token_bytes is not None
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids)


def test_an_invalid_byte_spoils_only_itself() -> None:
    tokenizer = tokenizer_of(sentencepiece_backend())
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "\u4f60".encode() + b"\xff\xe4\xbd"]
    assert tokenizer.decode(ids) == "\u4f60\ufffd\ufffd"


def test_decoders_that_do_more_than_join_bytes_are_left_to_the_package() -> None:
    tokenizer = tokenizer_of(metaspace_backend())
    assert tokenizer.token_bytes is None
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"


def test_a_directory_gives_special_tokens_and_every_id_that_ends_a_turn(tmp_path: Path) -> None:
    path = write_directory(tmp_path, byte_level_backend(), pad_token={"content": "<pad>", "lstrip": False})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == (1, 3, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert tokenizer.token_to_id("<pad>") in tokenizer.special_token_ids
    assert tokenizer.token_to_id("<think>") not in tokenizer.special_token_ids
    assert tokenizer.chat_template is None


def test_chat_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    path = write_directory(tmp_path, byte_level_backend(), chat_template=named)
    assert load_tokenizer(path).chat_templates == {"default": "A", "tool_use": "B"}
    (path / "chat_template.json").write_text('{"chat_template": "C"}')
    assert load_tokenizer(path).chat_templates == {"default": "C"}
    (path / "chat_template.jinja").write_text("D")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert load_tokenizer(path).chat_templates == {"default": "D", "rag": "E"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("generation_config.json", "{", "generation_config.json"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja"),
    ],
)
def test_a_broken_directory_is_refused_by_the_name_of_its_file(
    name: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = write_directory(tmp_path, byte_level_backend())
    (path / name).unlink(missing_ok=True)
    if content is not None:
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'; known are 'gpt2'"),
        ({"model": None}, "None; known are"),
        ({"pre": "unheard-of"}, "'unheard-of', which is not known; known are codeshell"),
        ({"tokens": None}, "tokens is missing"),
        ({"token_type": [1, 2]}, "token_type has 2 values for 425 tokens"),
        ({"merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"merges": ["nosuch token"]}, "do not fit"),
        ({"eos_token_id": 425}, "eos_token_id is 425, which is not in the vocabulary of 425"),
        ({"tokens": [1, 2], "token_type": None}, "tokens is not an array of str"),
    ],
)
def test_an_inconsistent_gguf_is_refused_with_what_is_wrong(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", **gguf_fields(**changes)))


def test_a_gguf_gives_bos_end_tokens_and_named_templates(tmp_path: Path) -> None:
    fields = gguf_fields(add_bos_token=True, add_eos_token=True, **TEMPLATES)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", **fields))
    assert tokenizer.add_bos
    assert tokenizer.encode("hello") == [0, *tokenizer.encode("hello", add_special_tokens=False), 1]
    assert tokenizer.eos_token_ids == (1, 3)  # eos_token_id, and <|im_end|> by its text
    assert tokenizer.chat_templates == {"default": "T", "tool_use": "U"}


def test_special_tokens_outside_the_byte_alphabet_keep_their_spelling(tmp_path: Path) -> None:
    fields = gguf_fields()
    fields["tokens"][2], fields["tokens"][3] = "<\uff5cUser\uff5c>", "<\uff5cend\u2581of\u2581turn\uff5c>"
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", **fields))
    assert tokenizer.vocab_size == len(fields["tokens"])
    assert tokenizer.encode("<\uff5cUser\uff5c>hi")[0] == 2
    assert tokenizer.decode([2], skip_special_tokens=False) == "<\uff5cUser\uff5c>"
    assert tokenizer.decode([2]) == ""
