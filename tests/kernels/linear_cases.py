"""Cases of the linear layers: row counts around the register blocks, widths around the panels, with and without bias."""

import torch

from millstream.kernels.linear import DenseWeight, can_block, has_matrix_unit, pack_dense
from millstream.kernels.linear_int4 import GROUP, pack_int4
from millstream.kernels.linear_int8 import pack_int8
from millstream.kernels.linear_w8a8 import pack_w8a8
from tests.kernels.operator_cases import Call, Draw, Tolerances, call, cases

NUM_ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 33)
NUM_OUTPUTS = (1, 15, 47, 48, 49, 96, 200)
SUMS: Tolerances = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.02, 0.02)}
FEW_INPUTS = (GROUP, 96, 160)
ROTATED_INPUTS = (4, 8, 16, 20, 32, 64, 80, 96, 132, 192)  # blocks of 4 to 64, one and several
HAS_ONEDNN = can_block(torch.empty(0, dtype=torch.bfloat16))
DENSE_VERSIONS = {
    "c": (torch.float32,) if has_matrix_unit(torch.bfloat16) else (torch.float32, torch.bfloat16),
    "onednn": (torch.bfloat16,) if HAS_ONEDNN else (),
}


def rows_bias_dtype(
    draw: Draw, num_inputs: int, num_outputs: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Activations, a bias in their type or none, the result's type."""
    x = draw.randn(NUM_ROWS[draw.seed % len(NUM_ROWS)], num_inputs) * 0.5
    bias = draw.randn(num_outputs) if draw.shapes.random() < 0.5 else None
    return x, bias, draw.shapes.choice((draw.dtype, torch.float32))


def scales(draw: Draw, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Half-precision numbers of either sign for each group, a few of them below the smallest normal one."""
    values = torch.randn(num_outputs, num_inputs // GROUP, generator=draw.generator) / 16
    return values.half() * draw.values.choice((1.0, 1.0, 2.0**-14))


def whole_numbers(draw: Draw, low: int, high: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Uniform in low..high."""
    return torch.randint(low, high + 1, shape, generator=draw.generator).to(dtype)


@cases("linear_dense", num_seeds=40, tolerances=SUMS, only=DENSE_VERSIONS)
def linear_dense_case(draw: Draw) -> Call:
    """Every third weight is in oneDNN's form."""
    num_outputs, num_inputs = draw.shapes.choice(NUM_OUTPUTS), draw.shapes.choice((2, 6, 64, 130))
    x, bias, out_dtype = rows_bias_dtype(draw, num_inputs, num_outputs)
    weight_NK = draw.randn(num_outputs, num_inputs) / num_inputs**0.5
    if draw.seed % 3 == 2 and can_block(weight_NK):
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
        return call(x, DenseWeight(num_outputs, num_inputs, bias, blocked=blocked), out_dtype)
    return call(x, pack_dense(weight_NK, bias), out_dtype)


@cases("linear_int4", num_seeds=30, tolerances=SUMS)
def linear_int4_case(draw: Draw) -> Call:
    """Offsets of either sign."""
    shape = draw.shapes.choice(NUM_OUTPUTS), draw.shapes.choice(FEW_INPUTS)
    x, bias, out_dtype = rows_bias_dtype(draw, shape[1], shape[0])
    q = whole_numbers(draw, 0, 15, shape, torch.uint8)
    return call(x, pack_int4(q, scales(draw, *shape), scales(draw, *shape), bias), out_dtype)


@cases("linear_int8", num_seeds=30, tolerances=SUMS)
def linear_int8_case(draw: Draw) -> Call:
    """-128 included."""
    shape = draw.shapes.choice(NUM_OUTPUTS), draw.shapes.choice(FEW_INPUTS)
    x, bias, out_dtype = rows_bias_dtype(draw, shape[1], shape[0])
    q = whole_numbers(draw, -128, 127, shape, torch.int8)
    return call(x, pack_int8(q, scales(draw, *shape) / 8, bias), out_dtype)


@cases("linear_w8a8", num_seeds=60, tolerances=SUMS)
def linear_w8a8_case(draw: Draw) -> Call:
    """Rows of zeros among the others."""
    shape = draw.shapes.choice(NUM_OUTPUTS), draw.shapes.choice(ROTATED_INPUTS)
    x, bias, out_dtype = rows_bias_dtype(draw, shape[1], shape[0])
    if len(x) > 2:
        x[1] = 0
    q = whole_numbers(draw, -127, 127, shape, torch.int8)
    return call(x, pack_w8a8(q, torch.rand(shape[0], generator=draw.generator) / 64, bias), out_dtype)
