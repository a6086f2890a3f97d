"""RMS normalisation over the last dimension, alone and fused with the residual addition.

T tokens (any leading shape), F features. fp32 arithmetic, rounded once. Weights that a model applies as (1 + w) have
the 1 folded in when they are loaded, and may stay fp32 beside a bf16 x.
"""

import ctypes

import torch

from .catalogue import operator
from .native import FLOAT, INT64, POINTER, are_heads_adjacent, find_typed, launch, needs_code, new_empty


@operator
def rms_norm(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    x = x_TF.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * weight_F.float()).to(x_TF.dtype)


@operator
def add_rms_norm(x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual in place; the norm of the (rounded) sum."""
    residual_TF += x_TF
    return rms_norm.reference(residual_TF, weight_F, eps)


class NormArgs(ctypes.Structure):
    """norm_args of cpu_elementwise.h."""

    _fields_ = (
        *((name, POINTER) for name in ("out", "x", "residual", "weight")),
        *((name, INT64) for name in ("is_weight_f32", "num_rows", "size", "heads", "token_stride")),
        ("eps", FLOAT),
    )


def _can_norm(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> bool:
    return (
        find_typed("cpu_operators", "rms_norm", x_TF) is not None
        and (x_TF.is_contiguous() or (x_TF.dim() == 3 and are_heads_adjacent(x_TF)))
        and weight_F.dtype in {x_TF.dtype, torch.float32}
        and weight_F.is_contiguous()
    )


def _can_add(x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> bool:
    return (
        _can_norm(x_TF, weight_F, eps)
        and x_TF.is_contiguous()
        and residual_TF.is_contiguous()
        and residual_TF.dtype == x_TF.dtype
    )


@rms_norm.version("c", takes=_can_norm, why_not=needs_code("cpu_operators"))
def rms_norm_c(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 and fp32 on CPU; a weight of x's type or fp32; [T, F], or heads [T, H, D] whose tokens may be apart."""
    out = new_empty(x_TF.shape, x_TF.dtype)
    _launch("rms_norm", out, x_TF, None, weight_F, eps)
    return out


@add_rms_norm.version("c", takes=_can_add, why_not=needs_code("cpu_operators"))
def add_rms_norm_c(x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 and fp32 on CPU, contiguous; a weight of x's type or fp32."""
    out = new_empty(x_TF.shape, x_TF.dtype)
    _launch("add_rms_norm", out, x_TF, residual_TF, weight_F, eps)
    return out


def _launch(
    name: str, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    size = weight.numel()
    heads, token_stride = (1, size) if x.is_contiguous() else (x.shape[1], x.stride(0))
    pointers = (out.data_ptr(), x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr())
    sizes = (weight.dtype == torch.float32, x.numel() // size, size, heads, token_stride)
    launch(find_typed("cpu_operators", name, x), NormArgs(*pointers, *sizes, eps))
