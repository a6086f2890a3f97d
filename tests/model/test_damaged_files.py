"""Whatever happens to a model's files, loading ends in a model or in a ModelError."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from millstream.common.model_config import load_model_config
from millstream.common.model_error import ModelError
from millstream.tp_worker.weights import load_weights
from tests.model.gguf_writing import write_model
from tests.model.run_decoder import ignore_progress
from tests.model.tiny_models import SIZES, save_model

NUM_FLIPS = 300
NUM_TRUNCATIONS = 150


def load(path: Path) -> bool:
    """Whether the model loads; anything but a ModelError passes through."""
    try:
        config = load_model_config(path, "auto")
        load_weights(path, config, "auto", torch.float32, "cpu", 0, 1, ignore_progress)
    except ModelError:
        return False
    return True


def damage(body: bytes, head: int) -> Iterator[bytes]:
    """Truncations everywhere and flipped bytes, half of them within the first `head` bytes."""
    draw = random.Random(11)
    for _ in range(NUM_TRUNCATIONS):
        yield body[: draw.choice([draw.randrange(len(body)), draw.randrange(head)])]
    for i in range(NUM_FLIPS):
        flipped = bytearray(body)
        for _ in range(draw.randint(1, 3)):
            flipped[draw.randrange(head if i % 4 else len(body))] = draw.randrange(256)
        yield bytes(flipped)


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF file."""
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf", "llama-tied", "llama")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small directory of safetensors."""
    return save_model("llama-tied", tmp_path)


def test_no_damage_to_a_gguf_file_ends_in_another_error(gguf_path: Path, tmp_path: Path) -> None:
    body = gguf_path.read_bytes()
    assert load(gguf_path)
    check_all_damage(tmp_path / "model.gguf", tmp_path / "model.gguf", body, head=4096)


def test_no_damage_to_safetensors_ends_in_another_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    body = file.read_bytes()
    assert load(folder)
    check_all_damage(folder, file, body, head=3000)


def test_no_damage_to_a_config_ends_in_another_error(folder: Path) -> None:
    file = folder / "config.json"
    check_all_damage(folder, file, file.read_bytes(), head=len(file.read_bytes()))


def check_all_damage(path: Path, file: Path, body: bytes, head: int) -> None:
    """Load with every damage; most of it must be noticed."""
    outcomes = []
    for damaged in damage(body, head):
        file.unlink(missing_ok=True)  # a new file each time: others may still be mapped
        file.write_bytes(damaged)
        outcomes.append(load(path))
    assert outcomes.count(False) > NUM_TRUNCATIONS


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(name: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"{name} is a pickle, which can run code and is never loaded"):
        load_model_config(folder, "auto")


def test_a_directory_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        load_model_config(folder, "auto")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", 7, "x.bin"])
def test_an_index_may_name_files_of_its_directory_only(file: object, folder: Path) -> None:
    save_model("llama-tied", folder, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    body = index.read_text()
    index.write_text(replace_first_file(body, file))
    config = load_model_config(folder, "auto")
    with pytest.raises(ModelError, match=r"is no \.safetensors file of this directory"):
        load_weights(folder, config, "auto", torch.float32, "cpu", 0, 1, ignore_progress)


def replace_first_file(index: str, file: object) -> str:
    """The index with its first tensor elsewhere."""
    parsed = json.loads(index)
    parsed["weight_map"][min(parsed["weight_map"])] = file
    return json.dumps(parsed)


def make_saver(**fields: object) -> Callable[[Path], None]:
    """Saves a llama that differs from SIZES, under the config of the usual one."""

    def save(folder: Path) -> None:
        config = (folder / "config.json").read_bytes()
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **fields}))
        model.save_pretrained(folder)
        (folder / "config.json").write_bytes(config)

    return save


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (make_saver(num_hidden_layers=2), "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        (make_saver(num_hidden_layers=4), "unexpected tensor model.layers.3.input_layernorm.weight"),
        (make_saver(attention_bias=True), "unexpected tensor model.layers.0.self_attn.k_proj.bias"),
        (make_saver(vocab_size=98), r"embed_tokens.weight has shape \(98, 48\), expected \(97, 48\)"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    save: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    save_model("llama", tmp_path)
    save(tmp_path)
    config = load_model_config(tmp_path, "auto")
    with pytest.raises(ModelError, match=message):
        load_weights(tmp_path, config, "auto", torch.float32, "cpu", 0, 1, ignore_progress)
