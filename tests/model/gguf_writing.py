"""Writes small GGUF files for the tests, from transformers' models with llama.cpp's conventions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.model.tiny_models import make_model

F32 = gguf.GGMLQuantizationType.F32
Arrays = Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Arrays) -> Path:
    """A file with `ARCHITECTURE.key` metadata (keys with a dot in front are taken as they are, without it)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = key[1:] if key.startswith(".") else f"{architecture}.{key}"
        add_value(writer, name, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """With the type that llama.cpp's converters use."""
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def write_model(
    path: Path,
    variant: str,
    architecture: str,
    kind: gguf.GGMLQuantizationType = F32,
    extra: Mapping[str, Any] | None = None,
    extra_tensors: Arrays | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """The variant of tiny_models as GGUF, its matrices quantised as `kind`, or as `kinds` has it for their name."""
    model = make_model(variant)
    config = model.config
    metadata = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        ".tokenizer.ggml.tokens": [f"token{i}" for i in range(config.vocab_size)],
        ".tokenizer.ggml.eos_token_id": 2,
        ".tokenizer.ggml.bos_token_id": 1,
        **(extra or {}),
    }
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array, stored, full_name = convert(name, parameter, architecture, config), F32, gguf_name(name, architecture)
        if array.ndim == 2:
            stored = (kinds or {}).get(full_name.split(".")[-2], kind)
            array = gguf.quants.quantize(array, stored)
        tensors[full_name] = (array, stored)
    return write_gguf(path, architecture, metadata, {**tensors, **(extra_tensors or {})})


def gguf_name(name: str, architecture: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    names = GEMMA_NAMES if architecture == "gemma3" else NAMES
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{suffix}"


def convert(name: str, parameter: torch.Tensor, architecture: str, config: Any) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf: permuted q and k of llama, 1 added to Gemma's norms."""
    x = parameter.detach().float()
    if architecture == "gemma3" and name.endswith("norm.weight"):
        x = x + 1
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        num_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        x = x.view(num_heads, 2, x.shape[0] // num_heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return np.ascontiguousarray(x.numpy())
