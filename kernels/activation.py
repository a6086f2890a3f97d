"""Gated activations of the feed-forward layer: act(gate) * up.

T tokens, F features; the input holds the gate's F features, then the up projection's. fp32 arithmetic, rounded once.
"""

import torch
from torch.nn.functional import gelu, silu


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F] in x's dtype."""
    return silu_and_mul_torch(x_T2F)


def gelu_tanh_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation of gelu, [T, F] in x's dtype."""
    return gelu_tanh_and_mul_torch(x_T2F)


def silu_and_mul_torch(x_T2F: torch.Tensor) -> torch.Tensor:
    """The reference."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x_T2F.dtype)


def gelu_tanh_and_mul_torch(x_T2F: torch.Tensor) -> torch.Tensor:
    """The reference."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x_T2F.dtype)
