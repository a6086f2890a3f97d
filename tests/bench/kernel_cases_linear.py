"""Linear layers by weight format, in the shapes of one layer and of the logits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from millstream.kernels.linear import DenseWeight, can_block, pack_dense
from millstream.kernels.linear_int4 import pack_int4
from millstream.kernels.linear_int8 import pack_int8
from millstream.kernels.linear_w8a8 import pack_w8a8
from tests.bench.floor import FORMATS
from tests.bench.kernel_cases import HIDDEN, INNER, VOCAB, Call, Case, bench, num_copies

SHAPES = {"qkv": (960, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
LM_HEAD = (VOCAB, HIDDEN)
NUM_ROWS = (1, 4, 8, 32, 256)
LOGITS_ROWS = (1, 8, 32)
GROUP = 32


@bench("linear_dense")
def dense_cases(dtype: torch.dtype) -> Iterator[Case]:
    """oneDNN's version beside ours, on weights in its own form."""

    def blocked(weight_NK: torch.Tensor) -> DenseWeight:
        return DenseWeight(*weight_NK.shape, None, blocked=torch.ops.mkldnn._reorder_linear_weight(weight_NK, None))

    def draw(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k).to(dtype)

    forms = {"onednn": lambda n, k: blocked(draw(n, k))} if can_block(torch.ones(1, 1, dtype=dtype)) else {}
    yield from _cases(dtype, lambda n, k: pack_dense(draw(n, k)), float(dtype.itemsize), forms=forms)


@bench("linear_int4")
def int4_cases(dtype: torch.dtype) -> Iterator[Case]:
    def make(n: int, k: int) -> object:
        scales = torch.rand(2, n, k // GROUP).half()
        return pack_int4(torch.randint(0, 16, (n, k), dtype=torch.uint8), *scales)

    yield from _cases(dtype, make, FORMATS["int4"].bytes_per_weight)


@bench("linear_int8")
def int8_cases(dtype: torch.dtype) -> Iterator[Case]:
    def make(n: int, k: int) -> object:
        return pack_int8(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, k // GROUP).half())

    yield from _cases(dtype, make, FORMATS["int8"].bytes_per_weight)


@bench("linear_w8a8")
def w8a8_cases(dtype: torch.dtype) -> Iterator[Case]:
    def make(n: int, k: int) -> object:
        return pack_w8a8(torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n))

    yield from _cases(dtype, make, FORMATS["w8a8"].bytes_per_weight, is_int8=True)


def _cases(
    dtype: torch.dtype,
    make: Callable[[int, int], Any],
    bytes_per_weight: float,
    *,
    forms: dict[str, Callable[[int, int], Any]] | None = None,
    is_int8: bool = False,
) -> Iterator[Case]:
    for name, (n, k) in {**SHAPES, "lm_head": LM_HEAD}.items():
        is_head = (n, k) == LM_HEAD
        out_dtype = torch.float32 if is_head else dtype
        count = num_copies(n * k * bytes_per_weight)
        weights = [make(n, k) for _ in range(count)]
        weights_of = {version: [form(n, k) for _ in range(count)] for version, form in (forms or {}).items()}
        for m in LOGITS_ROWS if is_head else NUM_ROWS:
            x = torch.randn(m, k).to(dtype)
            yield Case(
                f"{name} {n}x{k}, {m} rows",
                [Call(x, weight, out_dtype) for weight in weights],
                flops=2 * m * n * k,
                num_bytes=n * k * bytes_per_weight + x.nbytes + m * n * out_dtype.itemsize,
                is_int8=is_int8,
                calls_of={version: [Call(x, w, out_dtype) for w in each] for version, each in weights_of.items()},
            )
