"""From GGUF metadata to a ModelConfig, with llama.cpp's meanings."""

from typing import Any

from .config_fields import Fields
from .gguf_file import GGUFFile
from .gguf_names import hf_name
from .model_error import ModelError
from .model_struct import (
    FULL_ATTENTION,
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    QUANTISATION_GROUP,
    SLIDING_ATTENTION,
    ModelConfig,
    RopeConfig,
    check_model_config,
)
from .rope_config import yarn_attention_factor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GEMMA_PATTERN = 6  # every sixth layer is full attention
GEMMA_27B_LAYERS = 62  # llama.cpp tells the 27B model, whose attention scale differs, by its layers
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The config of an open GGUF file; ModelError names the metadata key that is wrong."""
    source = str(file.path)
    model_type = Fields(source, file.metadata).string("general.architecture")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{source}: architecture {model_type!r} is not known; known in GGUF files are {known}")
    fields = Fields(source, file.metadata, f"{model_type}.")
    if fields.integer("expert_count", 0, low=0, high=2**31):
        raise ModelError(f"{source}: {model_type}.expert_count: mixtures of experts are not supported")
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    hidden_size = fields.integer("embedding_length", high=MAX_WIDTH)
    num_heads = _same_for_all_layers(fields, "attention.head_count", None)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    layer_types = _layer_types(fields, model_type, num_layers)
    tokens = Fields(source, file.metadata, "tokenizer.ggml.")
    config = ModelConfig(
        architecture=ARCHITECTURES[model_type],
        model_type=model_type,
        weight_format="gguf",
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length", high=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_same_for_all_layers(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_position_embeddings=fields.integer("context_length", high=MAX_CONTEXT),
        rope=_rope(fields, model_type),
        local_rope=_local_rope(fields) if model_type == "gemma3" else None,
        sliding_window=_sliding_window(fields) if SLIDING_ATTENTION in layer_types else None,
        layer_types=layer_types,
        tie_word_embeddings="output.weight" not in file.tensors,
        mlp_shard_unit=_mlp_shard_unit(file),
        stored_types={hf_name(name, model_type): tensor.type.name for name, tensor in file.tensors.items()},
        eos_token_ids=tuple(dict.fromkeys(tokens.integer(k, low=0, high=MAX_VOCAB) for k in EOS_KEYS if k in tokens)),
        bos_token_id=tokens.integer("bos_token_id", low=0, high=MAX_VOCAB) if "bos_token_id" in tokens else None,
        **_family(fields, file, hidden_size, head_dim),
    )
    return check_model_config(config, source)


def _same_for_all_layers(fields: Fields, name: str, default: int | None) -> int:
    value = fields.raw(name)
    if isinstance(value, list):
        if not value or len(set(value)) > 1:
            raise ModelError(f"{fields.source}: {name} differs between layers, which is not supported")
        value = value[0]
        fields = Fields(fields.source, {name: value})
    return fields.integer(name, high=MAX_HEADS) if value is not None or default is None else default


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if "attention.key_length" not in fields and hidden_size % num_heads:
        raise ModelError(f"{fields.source}: embedding_length {hidden_size} does not divide into {num_heads} heads")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads, high=MAX_HEAD_DIM)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim, high=MAX_HEAD_DIM) != head_dim:
            raise ModelError(f"{fields.source}: {name} differs from the head dimension {head_dim}: not supported")
    return head_dim


def _layer_types(fields: Fields, model_type: str, num_layers: int) -> tuple[str, ...]:
    if model_type == "gemma3":
        pattern = fields.raw("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return tuple(SLIDING_ATTENTION if is_sliding else FULL_ATTENTION for is_sliding in pattern)
        period = fields.integer("attention.sliding_window_pattern", GEMMA_PATTERN, high=MAX_LAYERS)
        return tuple(SLIDING_ATTENTION if (i + 1) % period else FULL_ATTENTION for i in range(num_layers))
    is_sliding = model_type == "llama" and fields.raw("attention.sliding_window", 0) != 0  # Mistral
    return (SLIDING_ATTENTION if is_sliding else FULL_ATTENTION,) * num_layers


def _sliding_window(fields: Fields) -> int:
    return fields.integer("attention.sliding_window", high=MAX_CONTEXT)


def _rope(fields: Fields, model_type: str) -> RopeConfig:
    """Scaling by rope.scaling.*; llama 3's comes as the tensor rope_freqs.weight instead."""
    theta = fields.number("rope.freq_base", 1_000_000.0 if model_type == "gemma3" else 10_000.0, low=1.0)
    legacy = "rope.scale_linear" in fields and "rope.scaling.factor" not in fields
    kind = fields.string("rope.scaling.type", "linear" if legacy else "none")
    factor = fields.number("rope.scale_linear" if legacy else "rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    if kind != "yarn":
        raise ModelError(f"{fields.source}: rope.scaling.type {kind!r} is not known; known are none, linear, yarn")
    context = fields.integer("context_length", high=MAX_CONTEXT)
    scale = fields.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", context, high=MAX_CONTEXT
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=scale * yarn_attention_factor(factor),
    )


def _local_rope(fields: Fields) -> RopeConfig:
    return RopeConfig(theta=fields.number("rope.freq_base_swa", 10_000.0, low=1.0))


def _family(fields: Fields, file: GGUFFile, hidden_size: int, head_dim: int) -> dict[str, Any]:
    """What differs between families beyond sizes; biases are there if their tensors are."""
    family: dict[str, Any] = {
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "o_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "qk_norm": file.metadata["general.architecture"] in {"qwen3", "gemma3"},
        "attention_scale": head_dim**-0.5,
    }
    if file.metadata["general.architecture"] == "gemma3":
        num_heads, num_layers = (fields.raw(name) for name in ("attention.head_count", "block_count"))
        is_27b = num_layers == GEMMA_27B_LAYERS and isinstance(num_heads, int)
        family |= {
            "hidden_act": "gelu_tanh",
            "post_norms": True,
            "embed_scale": hidden_size**0.5,
            "attention_scale": (hidden_size / num_heads if is_27b else head_dim) ** -0.5,
            "attention_soft_cap": _soft_cap(fields, "attn_logit_softcapping"),
            "final_soft_cap": _soft_cap(fields, "final_logit_softcapping"),
        }
    return family


def _soft_cap(fields: Fields, name: str) -> float | None:
    return fields.number(name) if fields.raw(name) else None


def _vocab_size(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or table.shape[0] > MAX_VOCAB:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing or has the wrong shape")
    return table.shape[0]


def _mlp_shard_unit(file: GGUFFile) -> int:
    down = file.tensors.get("blk.0.ffn_down.weight")
    return QUANTISATION_GROUP if down is None else max(QUANTISATION_GROUP, down.type.block_size)
