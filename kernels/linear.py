"""Linear layers on weights in the activations' own type. T tokens, K input features, N output features.

Three ways of keeping a weight: in panels for our C code; in oneDNN's blocked form where the CPU has a matrix unit (AMX),
which our code does not use, or where there is no C code; as it is (CUDA, or no library at all).
"""

import ctypes
from dataclasses import dataclass

import torch

from .catalogue import operator
from .huge_pages import into_huge_pages
from .native import INT64, POINTER, find_typed, launch, needs_code, new_empty
from .weight_panels import into_panels, out_of_panels, vector_lanes


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One of the three forms is there."""

    out_features: int
    in_features: int
    bias_N: torch.Tensor | None
    plain_NK: torch.Tensor | None = None
    panels: torch.Tensor | None = None
    blocked: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        held = (self.plain_NK, self.panels, self.bias_N)
        size = sum(x.numel() * x.element_size() for x in held if x is not None)
        return size if self.blocked is None else size + 2 * self.out_features * self.in_features


def pack_dense(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> DenseWeight:
    """Keep a weight in the form that is fastest here."""
    (num_rows, num_columns), dtype = weight_NK.shape, weight_NK.dtype
    if not weight_NK.numel():
        return DenseWeight(num_rows, num_columns, bias_N, plain_NK=weight_NK)
    lanes = vector_lanes(dtype, weight_NK.device)
    if lanes is not None and not has_matrix_unit(dtype) and num_columns % 2 == 0:
        return DenseWeight(num_rows, num_columns, bias_N, panels=into_huge_pages(_into_pairs(weight_NK, lanes)))
    if can_block(weight_NK):
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        return DenseWeight(num_rows, num_columns, bias_N, blocked=blocked)
    return DenseWeight(num_rows, num_columns, bias_N, plain_NK=weight_NK)


def has_matrix_unit(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type in the CPU's matrix unit (AMX)."""
    return dtype == torch.bfloat16 and bool(torch.cpu._is_amx_tile_supported())


def can_block(weight_NK: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this weight in its blocked form here."""
    return (
        weight_NK.device.type == "cpu"
        and weight_NK.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


@operator
def linear_dense(x_TK: torch.Tensor, weight: DenseWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """x W^T + b, [T, N] in `out_dtype` (x's type or float32), summed in float32."""
    weight_NK = weight.plain_NK
    if weight.blocked is not None:
        weight_NK = weight.blocked.to_dense()
    elif weight.panels is not None:
        weight_NK = _out_of_pairs(weight.panels, weight.out_features)
    assert weight_NK is not None
    if out_dtype == x_TK.dtype:
        return torch.nn.functional.linear(x_TK, weight_NK, weight.bias_N)
    bias = None if weight.bias_N is None else weight.bias_N.to(out_dtype)
    return torch.nn.functional.linear(x_TK.to(out_dtype), weight_NK.to(out_dtype), bias)


class LinearArgs(ctypes.Structure):
    """linear_args of cpu_linear.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "scales", "bias", "out", "sums")),
        *((name, INT64) for name in ("num_rows", "out_features", "in_features", "is_out_f32")),
    )


def can_multiply(
    x_TK: torch.Tensor, out_dtype: torch.dtype, bias_N: torch.Tensor | None, name: str, *, lanes: int
) -> bool:
    """Whether C code has the activations, the bias, the result's type, and vectors as wide as the packed weight's."""
    return (
        x_TK.is_contiguous()
        and out_dtype in {x_TK.dtype, torch.float32}
        and (bias_N is None or (bias_N.dtype == x_TK.dtype and bias_N.is_contiguous()))
        and find_typed("cpu_linear", name, x_TK) is not None
        and vector_lanes(x_TK.dtype, x_TK.device) == lanes
    )


def _can_run_panels(x_TK: torch.Tensor, weight: DenseWeight, out_dtype: torch.dtype) -> bool:
    panels = weight.panels
    return (
        panels is not None
        and panels.dtype == x_TK.dtype
        and can_multiply(
            x_TK, out_dtype, weight.bias_N, "linear_dense", lanes=panels.shape[4 if panels.dtype.itemsize == 4 else 3]
        )
    )


def _why_no_panels(device: torch.device, dtype: torch.dtype) -> str:
    is_better_blocked = "oneDNN uses the CPU's matrix unit (AMX)" if has_matrix_unit(dtype) else ""
    return needs_code("cpu_linear")(device, dtype) or is_better_blocked


@linear_dense.version("c", takes=_can_run_panels, why_not=_why_no_panels)
def linear_dense_c(x_TK: torch.Tensor, weight: DenseWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 and fp32 on CPU, even K; weights in panels, which `pack_dense` makes on CPUs without AMX."""
    out = new_empty((*x_TK.shape[:-1], weight.out_features), out_dtype)
    assert weight.panels is not None
    bias = None if weight.bias_N is None else weight.bias_N.data_ptr()
    pointers = (x_TK.data_ptr(), weight.panels.data_ptr(), None, bias, out.data_ptr(), None)
    sizes = (x_TK.numel() // weight.in_features, weight.out_features, weight.in_features, out_dtype == torch.float32)
    launch(find_typed("cpu_linear", "linear_dense", x_TK), LinearArgs(*pointers, *sizes))
    return out


def _is_blocked(x_TK: torch.Tensor, weight: DenseWeight, out_dtype: torch.dtype) -> bool:
    return weight.blocked is not None and x_TK.numel() > 0


def _why_not_blocked(device: torch.device, dtype: torch.dtype) -> str:
    is_possible = device.type == "cpu" and can_block(torch.empty(0, dtype=dtype))
    return "" if is_possible else "oneDNN keeps only bf16 so, on CPUs that multiply it in hardware"


@linear_dense.version("onednn", takes=_is_blocked, why_not=_why_not_blocked)
def linear_dense_onednn(x_TK: torch.Tensor, weight: DenseWeight, out_dtype: torch.dtype) -> torch.Tensor:
    """bf16 on CPU; weights in oneDNN's form, which `pack_dense` makes on CPUs with AMX or without a C compiler."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, weight.blocked, weight.bias_N, "none", [], "")
    return out.to(out_dtype)


def _into_pairs(weight_NK: torch.Tensor, lanes: int) -> torch.Tensor:
    """Two-byte types: [B, K / 2, V, L, 2]; fp32: [B, K / 2, V, 2, L], the pair's halves in vectors of their own."""
    panels = into_panels(weight_NK, lanes, 2)
    return panels.transpose(3, 4) if weight_NK.dtype.itemsize == 4 else panels


def _out_of_pairs(panels: torch.Tensor, num_rows: int) -> torch.Tensor:
    return out_of_panels(panels.transpose(3, 4) if panels.dtype.itemsize == 4 else panels, num_rows)
