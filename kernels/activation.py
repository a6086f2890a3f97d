"""Gated activations of the feed-forward layer: act(gate) * up.

T tokens, F features; the input holds the gate's F features, then the up projection's. fp32 arithmetic, rounded once.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, silu

from .native import find_operator

Activation = Callable[[torch.Tensor], torch.Tensor]


def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F] in x's dtype."""
    return _call("silu_and_mul", silu_and_mul_torch, x_T2F)


def gelu_tanh_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation of gelu, [T, F] in x's dtype."""
    return _call("gelu_tanh_and_mul", gelu_tanh_and_mul_torch, x_T2F)


def silu_and_mul_torch(x_T2F: torch.Tensor) -> torch.Tensor:
    """The reference."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x_T2F.dtype)


def gelu_tanh_and_mul_torch(x_T2F: torch.Tensor) -> torch.Tensor:
    """The reference."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x_T2F.dtype)


def _call(name: str, reference: Activation, x_T2F: torch.Tensor) -> torch.Tensor:
    operator = find_operator(name, x_T2F)
    if operator is None:
        return reference(x_T2F)
    x = x_T2F.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    operator(out.data_ptr(), x.data_ptr(), out.numel() // max(size, 1), size, torch.get_num_threads())
    return out
