"""Gated activations of the feed-forward layer: act(gate) * up.

T tokens, F features; the input holds the gate's F features, then the up projection's. fp32 arithmetic, rounded once.
"""

import ctypes

import torch
from torch.nn.functional import gelu, silu

from .catalogue import operator
from .native import INT64, POINTER, find_typed, launch, needs_code, new_empty


@operator
def silu_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F] in x's dtype."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x_T2F.dtype)


@operator
def gelu_tanh_and_mul(x_T2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation of gelu, [T, F] in x's dtype."""
    gate, up = x_T2F.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(x_T2F.dtype)


class GatedArgs(ctypes.Structure):
    """gated_args of cpu_elementwise.h."""

    _fields_ = (("out", POINTER), ("x", POINTER), ("num_rows", INT64), ("size", INT64))


def _can_run(x_T2F: torch.Tensor) -> bool:
    return find_typed("cpu_operators", "silu_and_mul", x_T2F) is not None and x_T2F.is_contiguous()


@silu_and_mul.version("c", takes=_can_run, why_not=needs_code("cpu_operators"))
def silu_and_mul_c(x_T2F: torch.Tensor) -> torch.Tensor:
    """bf16 and fp32 on CPU, contiguous."""
    return _launch("silu_and_mul", x_T2F)


@gelu_tanh_and_mul.version("c", takes=_can_run, why_not=needs_code("cpu_operators"))
def gelu_tanh_and_mul_c(x_T2F: torch.Tensor) -> torch.Tensor:
    """bf16 and fp32 on CPU, contiguous."""
    return _launch("gelu_tanh_and_mul", x_T2F)


def _launch(name: str, x_T2F: torch.Tensor) -> torch.Tensor:
    size = x_T2F.shape[-1] // 2
    out_TF = new_empty((*x_T2F.shape[:-1], size), x_T2F.dtype)
    args = GatedArgs(out_TF.data_ptr(), x_T2F.data_ptr(), out_TF.numel() // max(size, 1), size)
    launch(find_typed("cpu_operators", name, x_T2F), args)
    return out_TF
