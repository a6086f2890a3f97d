"""From transformers' config.json (and generation_config.json) to a ModelConfig."""

import json
from pathlib import Path
from typing import Any

from .config_fields import REQUIRED, Fields
from .model_error import ModelError
from .model_struct import (
    FULL_ATTENTION,
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeConfig,
    check_model_config,
)
from .rope_config import hf_rope

MAX_JSON_BYTES = 16 * 2**20
MULTIMODAL_GEMMA = "Gemma3ForConditionalGeneration"  # served as the text model that it holds
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    MULTIMODAL_GEMMA: "gemma3_text",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
GEMMA_PATTERN = 6  # every sixth layer is full attention
QWEN3_HEAD_DIM = 128
GEMMA_DEFAULTS = {  # published files leave out what equals transformers' defaults
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
CODE_FIELDS = ("auto_map", "custom_pipelines", "trust_remote_code", "_attn_implementation_internal")
DTYPES = ("float32", "float16", "bfloat16")


def code_fields(folder: Path) -> list[str]:
    """Fields of config.json that would have other programs run code, or choose it; nothing here reads them."""
    path = folder / "config.json"
    return [name for name in CODE_FIELDS if name in read_json(path)] if path.is_file() else []


def read_hf_config(folder: Path) -> ModelConfig:
    """The config of a model directory; ModelError names the file and the field that is wrong."""
    source = folder / "config.json"
    fields = Fields(str(source), read_json(source))
    architecture = _architecture(fields)
    model_type = ARCHITECTURES[architecture]
    if model_type == "gemma3_text":
        fields = _gemma_fields(fields, architecture)
    for name in ("quantization_config", "compression_config"):
        if name in fields:
            raise ModelError(f"{source}: {name}: quantised safetensors are not supported")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = _head_dim(fields, model_type, hidden_size, num_heads)
    layer_types = _layer_types(fields, model_type, num_layers)
    rope, local_rope = _ropes(fields, model_type)
    config = ModelConfig(
        architecture=architecture,
        model_type=model_type,
        weight_format="safetensors",
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads, high=MAX_HEADS),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        max_position_embeddings=fields.integer("max_position_embeddings", high=MAX_CONTEXT),
        rope=rope,
        local_rope=local_rope,
        sliding_window=fields.integer("sliding_window", high=MAX_CONTEXT) if SLIDING_ATTENTION in layer_types else None,
        layer_types=layer_types,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", model_type == "gemma3_text"),
        hidden_act=_activation(fields, model_type),
        eos_token_ids=_eos_token_ids(folder, fields),
        bos_token_id=_token_ids(fields, "bos_token_id")[0] if "bos_token_id" in fields else None,
        dtype=_dtype(fields),
        **_family(fields, model_type, hidden_size, head_dim),
    )
    return check_model_config(config, str(source))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 16 MiB from a file; ModelError if it is anything else."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures", [])
    for name in names if isinstance(names, list) else []:
        if name in ARCHITECTURES:
            return str(name)
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{fields.source}: architecture {repr(names)[:120]} is not known; known are {known}")


def _gemma_fields(fields: Fields, architecture: str) -> Fields:
    """The text model's fields, defaults filled in; token ids may stand beside them."""
    text = fields.section("text_config") if architecture == MULTIMODAL_GEMMA else fields
    outer = {name: fields.raw(name) for name in ("eos_token_id", "bos_token_id", "dtype", "torch_dtype")}
    return Fields(fields.source, {**GEMMA_DEFAULTS, **outer, **text.present()})


def _head_dim(fields: Fields, model_type: str, hidden_size: int, num_heads: int) -> int:
    if "head_dim" not in fields and model_type != "qwen3" and hidden_size % num_heads:
        raise ModelError(f"{fields.source}: hidden_size {hidden_size} does not divide into {num_heads} heads")
    usual = QWEN3_HEAD_DIM if model_type == "qwen3" else hidden_size // num_heads
    return fields.integer("head_dim", usual, high=MAX_HEAD_DIM)


def _layer_types(fields: Fields, model_type: str, num_layers: int) -> tuple[str, ...]:
    declared = fields.raw("layer_types")
    if isinstance(declared, list) and all(isinstance(kind, str) for kind in declared):
        return tuple(declared)
    if declared is not None:
        raise fields.bad("layer_types", "a list of strings", declared)
    if model_type == "mistral" and "sliding_window" in fields:
        return (SLIDING_ATTENTION,) * num_layers
    if model_type == "gemma3_text":
        name = "sliding_window_pattern" if "sliding_window_pattern" in fields else "_sliding_window_pattern"
        pattern = fields.integer(name, GEMMA_PATTERN, high=MAX_LAYERS)
        return tuple(SLIDING_ATTENTION if (i + 1) % pattern else FULL_ATTENTION for i in range(num_layers))
    if model_type in ("qwen2", "qwen3") and fields.boolean("use_sliding_window", False):
        first = fields.integer("max_window_layers", 28, low=0, high=2**31)
        return tuple(SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(num_layers))
    return (FULL_ATTENTION,) * num_layers


def _ropes(fields: Fields, model_type: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of full layers, and that of sliding layers where it is another one (Gemma 3)."""
    rope = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    is_nested = FULL_ATTENTION in rope or SLIDING_ATTENTION in rope
    if model_type != "gemma3_text" and not is_nested:
        return hf_rope(fields, rope), None
    theta, local_theta = fields.raw("rope_theta"), None
    if model_type == "gemma3_text":
        theta = fields.number("rope_theta", 1_000_000.0)
        local_theta = fields.number("rope_local_base_freq", 10_000.0)
    full = rope.section(FULL_ATTENTION) if is_nested else rope
    local = rope.section(SLIDING_ATTENTION) if is_nested else Fields(rope.source, {})
    return hf_rope(fields, full, theta), hf_rope(fields, local, local_theta)


def _family(fields: Fields, model_type: str, hidden_size: int, head_dim: int) -> dict[str, Any]:
    """What differs between families beyond sizes."""
    bias = model_type == "qwen2" or (model_type != "mistral" and fields.boolean("attention_bias", False))
    family: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias and model_type != "qwen2",
        "mlp_bias": model_type == "llama" and fields.boolean("mlp_bias", False),
        "qk_norm": model_type in ("qwen3", "gemma3_text"),
        "attention_scale": head_dim**-0.5,
    }
    if model_type == "gemma3_text":
        if fields.boolean("use_bidirectional_attention", False):
            raise ModelError(f"{fields.source}: use_bidirectional_attention is not supported")
        family |= {
            "post_norms": True,
            "embed_scale": hidden_size**0.5,
            "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
            "attention_soft_cap": _optional_number(fields, "attn_logit_softcapping"),
            "final_soft_cap": _optional_number(fields, "final_logit_softcapping"),
        }
    return family


def _optional_number(fields: Fields, name: str) -> float | None:
    return fields.number(name) if name in fields else None


def _activation(fields: Fields, model_type: str) -> str:
    is_gemma = model_type == "gemma3_text"
    name = fields.string(*(("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")))
    if name not in ACTIVATIONS:
        raise ModelError(f"{fields.source}: activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _dtype(fields: Fields) -> str | None:
    name = fields.raw("dtype", fields.raw("torch_dtype"))
    return name if name in DTYPES else None


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Of generation_config.json where it names them, else of config.json."""
    path = folder / "generation_config.json"
    if path.is_file():
        generation = Fields(str(path), read_json(path))
        if "eos_token_id" in generation:
            return _token_ids(generation, "eos_token_id")
    return _token_ids(fields, "eos_token_id") if "eos_token_id" in fields else ()


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.raw(name, REQUIRED)
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(type(token_id) is int for token_id in ids):
        raise fields.bad(name, "a token id or a list of them", value)
    return tuple(ids)
