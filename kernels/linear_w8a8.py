"""Linear layers on 8-bit weights (one scale an output) and 8-bit activations, which are quantised on the way.

A token's activations have a scale for each 64 of them: one for all would give the few large ones all the digits
(SmoothQuant, https://arxiv.org/abs/2211.10438, shows them); perplexity was 3 % worse so, and is 0.1 % with groups.

T tokens, K input features, N output features, X groups of activations, B panels of V vectors of L lanes.
"""

import ctypes
from dataclasses import dataclass

import torch

from .catalogue import operator
from .huge_pages import into_huge_pages
from .linear import can_multiply
from .native import INT64, POINTER, find_typed, launch, needs_code, new_empty
from .weight_panels import into_panels, out_of_panels, vector_lanes

FOUR = 4  # inputs that one dot product takes
X_GROUP = 64  # activations that share a scale; the last group may have fewer


@dataclass(frozen=True, slots=True)
class W8A8Weight:
    """fours: int8 [B, K / 4, V, L, 4]; scales: float32 [B, V, L]; column_sums: int16 [B, X, V, L], of each group."""

    out_features: int
    in_features: int
    bias_N: torch.Tensor | None
    fours: torch.Tensor
    scales: torch.Tensor
    column_sums: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        held = (self.fours, self.scales, self.column_sums, self.bias_N)
        return sum(x.numel() * x.element_size() for x in held if x is not None)


def pack_w8a8(
    q_NK: torch.Tensor, scale_N: torch.Tensor, bias_N: torch.Tensor | None = None, *, lanes: int = 0
) -> W8A8Weight:
    """From int8 values and float32 scales; K is a multiple of 4. `lanes` is that of this machine unless given."""
    lanes = lanes or vector_lanes(torch.bfloat16, q_NK.device) or 1
    groups_NX = [part.sum(dim=1, dtype=torch.int16) for part in q_NK.split(X_GROUP, dim=1)]
    sums = into_panels(torch.stack(groups_NX, dim=1), lanes, 1)[..., 0]
    scales = into_panels(scale_N[:, None], lanes, 1).flatten(1)
    fours = into_huge_pages(into_panels(q_NK, lanes, FOUR))
    num_rows, num_columns = q_NK.shape
    return W8A8Weight(num_rows, num_columns, bias_N, fours, scales.contiguous(), into_huge_pages(sums))


def quantise_groups(x_TK: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each group of inputs: float32 whole numbers -127..127 [T, 64], float32 scales [T, 1]."""
    whole_numbers, scales = [], []
    for x in x_TK.float().split(X_GROUP, dim=-1):
        largest = x.abs().amax(dim=-1, keepdim=True)
        inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)  # 127.0 / x is no division
        whole_numbers.append(torch.round(x.double() * inverse.double()).float())
        scales.append(largest / 127.0)
    return whole_numbers, scales


@operator
def linear_w8a8(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """x W^T + b, [T, N] in `out_dtype` (x's type or float32); exact sums of whole numbers in a group, then the scales."""
    q_NK = out_of_panels(weight.fours, weight.out_features).double()
    y_TN = torch.zeros((*x_TK.shape[:-1], weight.out_features), device=x_TK.device)
    for q_TX, scale_T1, q_NX in zip(*quantise_groups(x_TK), q_NK.split(X_GROUP, dim=1), strict=True):
        y_TN += torch.nn.functional.linear(q_TX.double(), q_NX).float() * scale_T1
    y_TN *= weight.scales.flatten()[: weight.out_features]
    return (y_TN if weight.bias_N is None else y_TN + weight.bias_N.float()).to(out_dtype)


class W8A8Args(ctypes.Structure):
    """w8a8_args of cpu_linear_w8a8.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "scales", "column_sums", "bias", "out", "quantised", "x_scales")),
        *((name, INT64) for name in ("num_rows", "out_features", "in_features", "is_out_f32")),
    )


def _can_run(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> bool:
    lanes = weight.fours.shape[3]
    return can_multiply(x_TK, out_dtype, weight.bias_N, "linear_w8a8") and lanes == vector_lanes(
        x_TK.dtype, x_TK.device
    )


@linear_w8a8.version("c", takes=_can_run, why_not=needs_code("cpu_linear"))
def linear_w8a8_c(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 and fp32 activations on CPU; fast with AVX512-VNNI."""
    num_rows, in_features = x_TK.numel() // weight.in_features, weight.in_features
    out = new_empty((*x_TK.shape[:-1], weight.out_features), out_dtype)
    quantised = new_empty((num_rows, in_features), torch.uint8)
    x_scales = new_empty((num_rows, -(-in_features // X_GROUP)), torch.float32)
    bias = None if weight.bias_N is None else weight.bias_N.data_ptr()
    tensors = (x_TK, weight.fours, weight.scales, weight.column_sums)
    pointers = (*(x.data_ptr() for x in tensors), bias, out.data_ptr(), quantised.data_ptr(), x_scales.data_ptr())
    sizes = (num_rows, weight.out_features, in_features, out_dtype == torch.float32)
    launch(find_typed("cpu_linear", "linear_w8a8", x_TK), W8A8Args(*pointers, *sizes))
    return out
