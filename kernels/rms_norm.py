"""RMS normalisation over the last dimension, alone and fused with the residual addition.

T tokens (any leading shape), F features. fp32 arithmetic, rounded once. Weights that a model applies as (1 + w) have
the 1 folded in when they are loaded.
"""

import torch


def rms_norm(x_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in x's dtype."""
    return rms_norm_torch(x_TF, weight_F, eps)


def add_rms_norm(x_TF: torch.Tensor, residual_TF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual in place; the norm of the (rounded) sum."""
    return add_rms_norm_torch(x_TF, residual_TF, weight_F, eps)


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
