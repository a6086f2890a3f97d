"""Linear layers on 4-bit weights in groups of 32 inputs: weight = d * q + m. The activations keep their type.

T tokens, K input features, N output features, G = K / 32 groups, B panels of V vectors of L lanes.
"""

from dataclasses import dataclass

import torch

from .catalogue import operator
from .huge_pages import into_huge_pages
from .linear import LinearArgs, can_multiply
from .native import find_typed, launch, needs_code, new_empty
from .weight_panels import into_panels, out_of_panels, vector_lanes

GROUP = 32
QUAD = 8  # inputs whose nibbles share 16-bit words: four pairs


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """words: uint8 [B, K / 8, V, L, 4]; scales: float16 [B, G, 2, V, L], d and then m."""

    out_features: int
    in_features: int
    bias_N: torch.Tensor | None
    words: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(x.numel() * x.element_size() for x in (self.words, self.scales, self.bias_N) if x is not None)


def pack_int4(
    q_NK: torch.Tensor, d_NG: torch.Tensor, m_NG: torch.Tensor, bias_N: torch.Tensor | None = None, *, lanes: int = 0
) -> Int4Weight:
    """From uint8 values 0..15 and float16 scales. `lanes` is that of this machine unless given."""
    lanes = lanes or vector_lanes(torch.bfloat16, q_NK.device) or 1
    num_rows, num_columns = q_NK.shape
    quads = into_panels(q_NK, lanes, QUAD)
    quads = quads.reshape(*quads.shape[:-1], 4, 2)  # pairs of a quad, inputs of a pair
    low, high = quads[..., 0::2, :], quads[..., 1::2, :]  # nibble j of a word is pair j: byte j / 2
    words = (low | high << 4).transpose(-1, -2).flatten(-2)  # word of input 0, then of input 1
    scales = torch.stack([into_panels(x, lanes, 1)[..., 0] for x in (d_NG, m_NG)], dim=2)
    return Int4Weight(num_rows, num_columns, bias_N, into_huge_pages(words), into_huge_pages(scales))


def unpack_int4(weight: Int4Weight) -> torch.Tensor:
    """float32 [N, K]."""
    words = weight.words.view(*weight.words.shape[:-1], 2, 2).transpose(-1, -2)
    quads = torch.stack((words & 15, words >> 4), dim=-2).flatten(-4)
    q_NK = out_of_panels(quads.view(*weight.words.shape[:4], QUAD), weight.out_features).float()
    d_NG, m_NG = (out_of_panels(x[..., None], weight.out_features).float() for x in weight.scales.unbind(2))
    return q_NK * d_NG.repeat_interleave(GROUP, dim=1) + m_NG.repeat_interleave(GROUP, dim=1)


@operator
def linear_int4(x_TK: torch.Tensor, weight: Int4Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """x W^T + b, [T, N] in `out_dtype` (x's type or float32), summed in float32."""
    bias = None if weight.bias_N is None else weight.bias_N.float()
    return torch.nn.functional.linear(x_TK.float(), unpack_int4(weight), bias).to(out_dtype)


def _can_run(x_TK: torch.Tensor, weight: Int4Weight, out_dtype: torch.dtype) -> bool:
    return can_multiply(x_TK, out_dtype, weight.bias_N, "linear_int4", lanes=weight.words.shape[3])


@linear_int4.version("c", takes=_can_run, why_not=needs_code("cpu_linear"))
def linear_int4_c(x_TK: torch.Tensor, weight: Int4Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 and fp32 activations on CPU."""
    num_rows, in_features = x_TK.numel() // weight.in_features, weight.in_features
    out = new_empty((*x_TK.shape[:-1], weight.out_features), out_dtype)
    sums = new_empty((num_rows, in_features // GROUP), torch.float32)
    bias = None if weight.bias_N is None else weight.bias_N.data_ptr()
    pointers = (x_TK.data_ptr(), weight.words.data_ptr(), weight.scales.data_ptr(), bias, out.data_ptr())
    sizes = (num_rows, weight.out_features, in_features, out_dtype == torch.float32)
    launch(find_typed("cpu_linear", "linear_int4", x_TK), LinearArgs(*pointers, sums.data_ptr(), *sizes))
    return out
