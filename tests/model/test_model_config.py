"""config.json of every family, read and checked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from millstream.common.model_config import ModelConfig, load_model_config
from millstream.common.model_error import ModelError
from millstream.tp_worker.rope import inverse_frequencies
from tests.model.tiny_models import LLAMA3, VARIANTS, YARN, make_model

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}


def read(folder: Path, changes: dict[str, Any] | None = None, **files: Any) -> ModelConfig:
    """The config of a directory whose config.json is SMALL with changes; None removes a field."""
    fields = {name: value for name, value in {**SMALL, **(changes or {})}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    for name, body in files.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return load_model_config(folder, "dummy")


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (6, 8, 10_000.0)
    assert config.layer_types == ("full_attention",) * 2
    assert config.eos_token_ids == ()
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_number_of_parameters_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    model.config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": [type(model).__name__]}))
    expected = model.num_parameters()
    if variant == "gemma3-multimodal":
        expected = make_model("gemma3").num_parameters()
    assert load_model_config(tmp_path, "dummy").num_parameters == expected


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    config = read(tmp_path, {"num_key_value_heads": 3})
    assert config.kv_bytes_per_token(2) == 2 * 2 * 3 * 8 * 2
    assert config.kv_bytes_per_token(4, num_kv_heads=1) == 2 * 2 * 1 * 8 * 4


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 2}).eos_token_ids == (2,)
    assert read(tmp_path, {"eos_token_id": 2}, generation_config={"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert read(tmp_path, {"eos_token_id": [5, 6]}, generation_config={}).eos_token_ids == (5, 6)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        YARN,
        YARN | {"attention_factor": 0.6, "beta_fast": 20.0, "beta_slow": 2.0},
        YARN | {"original_max_position_embeddings": 64, "factor": 2.0},
    ],
)
def test_rope_scaling_is_that_of_transformers(rope: dict[str, Any], name: str, tmp_path: Path) -> None:
    theta = rope.get("rope_theta", 10_000.0)
    oracle = transformers.LlamaConfig(
        head_dim=32, max_position_embeddings=64, rope_parameters={"rope_theta": theta} | rope
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](oracle, torch.device("cpu"))
    config = read(tmp_path, {"head_dim": 32, name: rope})
    torch.testing.assert_close(inverse_frequencies(config.rope, 32), expected)
    assert config.rope.attention_factor == pytest.approx(factor)


def test_old_gemma_configs_name_their_local_theta(tmp_path: Path) -> None:
    changes = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_key_value_heads": 2,
        "rope_local_base_freq": 77.0,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 5,
        "sliding_window_pattern": 2,
    }
    config = read(tmp_path, changes)
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.rope_type) == (77.0, "default")
    assert (config.rope.theta, config.rope.factor) == (5000.0, 8.0)
    assert config.layer_types == ("sliding_attention", "full_attention")
    assert config.tie_word_embeddings


def test_rope_parameters_may_be_given_for_each_kind_of_layer(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    }
    config = read(tmp_path, {"rope_parameters": rope})
    assert config.local_rope is not None
    assert (config.rope.rope_type, config.rope.theta, config.local_rope.theta) == ("linear", 100.0, 200.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"\['MambaForCausalLM'\] is not known; known are LlamaForCausalLM, Mis",
        ),
        ({"architectures": None}, "is not known; known are"),
        ({"architectures": 7}, "is not known; known are"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1 to"),
        ({"vocab_size": 2**40}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number"),
        ({"hidden_size": 47}, "hidden_size 47 does not divide into 6 heads"),
        ({"head_dim": 7}, "the head dimension 7 is odd"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"hidden_act": "relu"}, "activation 'relu' is not known; known are silu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope type 'longrope' is not known; known are default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic' is not known"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor 4.0 must be below high_freq_factor"),
        ({"rope_scaling": []}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 2 layers"),
        ({"layer_types": ["linear_attention"] * 2}, "unknown layer types linear_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ({"eos_token_id": 100}, "special token 100 is not in the vocabulary of 100"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors are not supported"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_naming_the_field(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000], ids=range(5))
def test_a_config_that_is_no_json_object_is_refused(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(body)
    with pytest.raises(ModelError, match=r"config\.json: "):
        load_model_config(tmp_path, "dummy")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a directory"):
        load_model_config(tmp_path / "none", "auto")
    with pytest.raises(ModelError, match=r"holds no \.gguf file"):
        load_model_config(tmp_path, "gguf")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files; name one of them"):
        load_model_config(tmp_path, "auto")
