"""Tiny random models of every family, made and run by transformers: the oracle of the decoder's logits."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 97
NUM_TOKENS = 41

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
}


def _llama(**fields: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**{**SIZES, **fields})


def _mistral(**fields: Any) -> transformers.PreTrainedConfig:
    return transformers.MistralConfig(**{**SIZES, "sliding_window": 7, **fields})


def _qwen2(**fields: Any) -> transformers.PreTrainedConfig:
    return transformers.Qwen2Config(**{**SIZES, **fields})


def _qwen3(**fields: Any) -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**{**SIZES, **fields})


def _gemma3(**fields: Any) -> transformers.PreTrainedConfig:
    own = {"sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
    return transformers.Gemma3TextConfig(**{**SIZES, "tie_word_embeddings": True, **own, **fields})


def _gemma3_multimodal() -> transformers.PreTrainedConfig:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    special = {"boi_token_index": 94, "eoi_token_index": 95, "image_token_index": 96, "mm_tokens_per_image": 4}
    return transformers.Gemma3Config(text_config=_gemma3().to_dict(), vision_config=vision, **special)


VARIANTS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(rope_parameters=LINEAR),
    "llama-llama3": lambda: _llama(rope_parameters=LLAMA3),
    "llama-yarn": lambda: _llama(rope_parameters=YARN),
    "llama-yarn-mscale": lambda: _llama(
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "truncate": False}
    ),
    "mistral-sliding": _mistral,
    "mistral-full": lambda: _mistral(sliding_window=None),
    "qwen2": _qwen2,
    "qwen2-sliding": lambda: _qwen2(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gemma3-multimodal": _gemma3_multimodal,
    "gemma3-gguf": lambda: _gemma3(query_pre_attn_scalar=16),
    "gemma3-scaled": lambda: _gemma3(rope_parameters=GEMMA_ROPE, final_logit_softcapping=5.0),
}

WIDE = {"hidden_size": 96, "intermediate_size": 160}  # rows of whole quantisation blocks
GGUF_VARIANTS = {
    "llama-wide": lambda: _llama(**WIDE, tie_word_embeddings=True),
    "qwen2-wide": lambda: _qwen2(**WIDE),
    "llama-narrow-heads": lambda: _llama(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4
    ),
}


@cache
def make_model(variant: str) -> transformers.PreTrainedModel:
    """The variant's model with seeded weights, norms and biases included."""
    torch.manual_seed(7)
    config = {**VARIANTS, **GGUF_VARIANTS}[variant]()
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save_model(variant: str, folder: Path, **options: Any) -> Path:
    """Write the variant as a directory of safetensors."""
    make_model(variant).save_pretrained(folder, **options)
    return folder


def prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    """Fixed ids that are not special."""
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    return ids


@cache
def expected_logits(variant: str) -> torch.Tensor:
    """transformers' logits [T, V] for `prompt()`."""
    with torch.no_grad():
        logits: torch.Tensor = make_model(variant)(torch.tensor([prompt()])).logits[0]
    return logits
