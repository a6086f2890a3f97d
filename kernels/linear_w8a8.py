"""Linear layers on 8-bit weights (one scale an output) and 8-bit activations (one scale a token, found on the way).

A few inputs are far larger than the others and would leave them no digits, so blocks of 64 inputs are rotated first,
which spreads each over its block: Hadamard's transform (QuaRot, https://arxiv.org/abs/2404.00456). The weights are
rotated when they are made, which leaves their product with the activations as it was. tests/bench/NOTES.md has figures.

T tokens, K input features, N output features, B panels of V vectors of L lanes.
"""

import ctypes
from dataclasses import dataclass

import torch

from .catalogue import operator
from .huge_pages import into_huge_pages
from .linear import can_multiply
from .native import INT64, POINTER, find_typed, launch, needs_code, new_empty
from .weight_panels import into_panels, out_of_panels, vector_lanes

MAX_BLOCK = 64  # inputs that are rotated together
FOUR = 4  # inputs that one dot product takes


@dataclass(frozen=True, slots=True)
class W8A8Weight:
    """fours: int8 [B, K / 4, V, L, 4]; scales: float32 [B, V, L]; column_sums: int32, 128 times the sums over K."""

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
    """From int8 values and float32 scales of a weight made by `rotate_weight`; K is a multiple of 4. `lanes` is that of this machine unless given."""
    lanes = lanes or vector_lanes(torch.bfloat16, q_NK.device) or 1
    sums_N = q_NK.sum(dim=1, dtype=torch.int32) * 128
    scales, sums = (into_panels(x[:, None], lanes, 1).flatten(1) for x in (scale_N, sums_N))
    fours = into_huge_pages(into_panels(q_NK, lanes, FOUR))
    num_rows, num_columns = q_NK.shape
    return W8A8Weight(num_rows, num_columns, bias_N, fours, scales.contiguous(), sums.contiguous())


def block_size(in_features: int) -> int:
    """The largest power of two up to 64 that divides the number of inputs."""
    return min(MAX_BLOCK, in_features & -in_features)


def rotate(x_TK: torch.Tensor) -> torch.Tensor:
    """float32: Hadamard's transform of each block of inputs. Twice gives x times the block size."""
    num_inputs = x_TK.shape[-1]
    size, x, distance = block_size(num_inputs), x_TK.float(), 1
    while distance < size:
        low, high = x.reshape(*x_TK.shape[:-1], num_inputs // (2 * distance), 2, distance).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2)
        distance *= 2
    return x.reshape(x_TK.shape)


def rotate_weight(weight_NK: torch.Tensor) -> torch.Tensor:
    """float32: what is multiplied with rotated inputs in place of the weight."""
    return rotate(weight_NK) / block_size(weight_NK.shape[1])


def quantise_rows(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 whole numbers -127..127 [T, K], float32 scales [T, 1])."""
    x = x_TK.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)  # 127.0 / x is no division
    return torch.round(x.double() * inverse.double()).float(), largest / 127.0


@operator
def linear_w8a8(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """rotate(x) W^T + b, [T, N] in `out_dtype` (x's type or float32); exact sums of whole numbers, then both scales."""
    q_TK, scale_T1 = quantise_rows(rotate(x_TK))
    q_NK = out_of_panels(weight.fours, weight.out_features).double()
    scale_N = weight.scales.flatten()[: weight.out_features]
    y_TN = torch.nn.functional.linear(q_TK.double(), q_NK).float() * scale_N * scale_T1
    return (y_TN if weight.bias_N is None else y_TN + weight.bias_N.float()).to(out_dtype)


class W8A8Args(ctypes.Structure):
    """w8a8_args of cpu_linear_w8a8.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "scales", "column_sums", "bias")),
        *((name, POINTER) for name in ("out", "quantised", "x_scales", "rotated")),
        *((name, INT64) for name in ("num_rows", "out_features", "in_features", "is_out_f32", "block")),
    )


def _can_run(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> bool:
    return can_multiply(x_TK, out_dtype, weight.bias_N, "linear_w8a8", lanes=weight.fours.shape[3])


@linear_w8a8.version("c", takes=_can_run, why_not=needs_code("cpu_linear"))
def linear_w8a8_c(x_TK: torch.Tensor, weight: W8A8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 and fp32 activations on CPU; fast with AVX512-VNNI."""
    num_rows, in_features = x_TK.numel() // weight.in_features, weight.in_features
    out = new_empty((*x_TK.shape[:-1], weight.out_features), out_dtype)
    quantised, x_scales = new_empty((num_rows, in_features), torch.uint8), new_empty((num_rows,), torch.float32)
    bias = None if weight.bias_N is None else weight.bias_N.data_ptr()
    tensors = (x_TK, weight.fours, weight.scales, weight.column_sums)
    rotated = new_empty((torch.get_num_threads(), in_features), torch.float32)
    made = (out, quantised, x_scales, rotated)
    pointers = (*(x.data_ptr() for x in tensors), bias, *(x.data_ptr() for x in made))
    sizes = (num_rows, weight.out_features, in_features, out_dtype == torch.float32, block_size(in_features))
    launch(find_typed("cpu_linear", "linear_w8a8", x_TK), W8A8Args(*pointers, *sizes))
    return out
