"""Linear layers on 8-bit weights in groups of 32 inputs: weight = d * q. The activations keep their type.

T tokens, K input features, N output features, G = K / 32 groups, B panels of V vectors of L lanes.
"""

from dataclasses import dataclass

import torch

from .catalogue import operator
from .huge_pages import into_huge_pages
from .linear import LinearArgs, can_multiply
from .linear_int4 import GROUP
from .native import find_typed, launch, needs_code, new_empty
from .weight_panels import into_panels, out_of_panels, vector_lanes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """pairs: int8 [B, K / 2, V, L, 2]; scales: float16 [B, G, V, L]."""

    out_features: int
    in_features: int
    bias_N: torch.Tensor | None
    pairs: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(x.numel() * x.element_size() for x in (self.pairs, self.scales, self.bias_N) if x is not None)


def pack_int8(
    q_NK: torch.Tensor, d_NG: torch.Tensor, bias_N: torch.Tensor | None = None, *, lanes: int = 0
) -> Int8Weight:
    """From int8 values and float16 scales. `lanes` is that of this machine unless given."""
    lanes = lanes or vector_lanes(torch.bfloat16, q_NK.device) or 1
    pairs, scales = into_panels(q_NK, lanes, 2), into_panels(d_NG, lanes, 1)[..., 0]
    num_rows, num_columns = q_NK.shape
    return Int8Weight(num_rows, num_columns, bias_N, into_huge_pages(pairs), into_huge_pages(scales))


def unpack_int8(weight: Int8Weight) -> torch.Tensor:
    """float32 [N, K]."""
    q_NK = out_of_panels(weight.pairs, weight.out_features).float()
    d_NG = out_of_panels(weight.scales[..., None], weight.out_features).float()
    return q_NK * d_NG.repeat_interleave(GROUP, dim=1)


@operator
def linear_int8(x_TK: torch.Tensor, weight: Int8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """x W^T + b, [T, N] in `out_dtype` (x's type or float32), summed in float32."""
    bias = None if weight.bias_N is None else weight.bias_N.float()
    return torch.nn.functional.linear(x_TK.float(), unpack_int8(weight), bias).to(out_dtype)


def _can_run(x_TK: torch.Tensor, weight: Int8Weight, out_dtype: torch.dtype) -> bool:
    return can_multiply(x_TK, out_dtype, weight.bias_N, "linear_int8", lanes=weight.pairs.shape[3])


@linear_int8.version("c", takes=_can_run, why_not=needs_code("cpu_linear"))
def linear_int8_c(x_TK: torch.Tensor, weight: Int8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 and fp32 activations on CPU."""
    out = new_empty((*x_TK.shape[:-1], weight.out_features), out_dtype)
    bias = None if weight.bias_N is None else weight.bias_N.data_ptr()
    pointers = (x_TK.data_ptr(), weight.pairs.data_ptr(), weight.scales.data_ptr(), bias, out.data_ptr(), None)
    sizes = (x_TK.numel() // weight.in_features, weight.out_features, weight.in_features, out_dtype == torch.float32)
    launch(find_typed("cpu_linear", "linear_int8", x_TK), LinearArgs(*pointers, *sizes))
    return out
