"""RMS normalisation over the last dimension, alone and fused with the residual addition.

T tokens (any leading shape), F features. fp32 arithmetic, rounded once. Weights that a model applies as (1 + w) have
the 1 folded in when they are loaded, and may stay fp32 beside a bf16 x.
"""

import torch

from .native import find_operator


def rms_norm(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    operator = find_operator("rms_norm", x_TF)
    if operator is None:
        return rms_norm_torch(x_TF, weight_F, eps)
    x, weight = x_TF.contiguous(), _weight_for(x_TF, weight_F)
    out, size = torch.empty_like(x), weight.numel()
    pointers = (out.data_ptr(), x.data_ptr(), weight.data_ptr())
    operator(*pointers, weight.dtype == torch.float32, x.numel() // size, size, eps, torch.get_num_threads())
    return out


def add_rms_norm(x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual in place; the norm of the (rounded) sum."""
    operator = find_operator("add_rms_norm", x_TF)
    if operator is None or not residual_TF.is_contiguous() or residual_TF.dtype != x_TF.dtype:
        return add_rms_norm_torch(x_TF, residual_TF, weight_F, eps)
    x, weight = x_TF.contiguous(), _weight_for(x_TF, weight_F)
    out, size = torch.empty_like(x), weight.numel()
    pointers = (out.data_ptr(), x.data_ptr(), residual_TF.data_ptr(), weight.data_ptr())
    operator(*pointers, weight.dtype == torch.float32, x.numel() // size, size, eps, torch.get_num_threads())
    return out


def _weight_for(x_TF: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
    """The weight in a type that the C version takes: x's, or fp32."""
    return weight_F.contiguous() if weight_F.dtype == x_TF.dtype else weight_F.float().contiguous()


def rms_norm_torch(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """The reference."""
    x = x_TF.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * weight_F.float()).to(x_TF.dtype)


def add_rms_norm_torch(
    x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float
) -> torch.Tensor:
    """The reference."""
    residual_TF += x_TF
    return rms_norm_torch(residual_TF, weight_F, eps)
