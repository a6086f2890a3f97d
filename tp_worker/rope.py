"""Rotary tables of one step. T tokens, C pairs of rotary dimensions. Oracle: transformers' ROPE_INIT_FUNCTIONS."""

import math

import torch

from ..common.model_struct import RopeConfig
from ..kernels.rotary import rotary_tables


class Rope:
    """cos and sin for the positions of a step; `factors` (llama 3 in GGUF files) divide the frequencies one by one."""

    def __init__(
        self, config: RopeConfig, rotary_dim: int, device: torch.device, factors: torch.Tensor | None = None
    ) -> None:
        inv_freq = inverse_frequencies(config, rotary_dim)
        if factors is not None:
            inv_freq = inv_freq / factors.float().cpu()
        self._inv_freq_C = inv_freq.to(device)
        self._attention_factor = config.attention_factor

    def __call__(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_TC, sin_TC), float32."""
        return rotary_tables(positions_T, self._inv_freq_C, self._attention_factor)


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """float32 [R / 2]: radians per position of each pair."""
    inv_freq = 1.0 / (config.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
    if config.rope_type == "linear":
        return inv_freq / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, inv_freq)
    if config.rope_type == "yarn":
        return _yarn(config, rotary_dim, inv_freq)
    return inv_freq


def _llama3(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    original, low, high = (
        config.original_max_position_embeddings,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    wavelengths = 2 * math.pi / inv_freq
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq


def _yarn(config: RopeConfig, rotary_dim: int, inv_freq: torch.Tensor) -> torch.Tensor:
    """NTK by parts (https://arxiv.org/abs/2309.00071, section 3.2)."""
    low, high = (_correction_dim(config, rotary_dim, beta) for beta in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * stretched + inv_freq * (1 - stretched)


def _correction_dim(config: RopeConfig, rotary_dim: int, num_rotations: float) -> float:
    """The dimension whose frequency makes `num_rotations` turns in the original context."""
    turns = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
    return rotary_dim * math.log(turns) / (2 * math.log(config.theta))
