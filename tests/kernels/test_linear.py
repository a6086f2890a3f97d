"""Packed products: values, shapes, and where packing applies."""

import pytest
import torch
from torch.nn.functional import linear

from millstream.kernels.linear import PackedLinear, can_pack

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 32), (5, 33, 17), (130, 960, 576), (0, 8, 4)])
def test_a_packed_product_is_the_plain_one(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    m, n, k = shape
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (n, k), (n,)))
    packed = PackedLinear(weight, bias if has_bias else None)
    expected = linear(x.double(), weight.double(), bias.double() if has_bias else None)
    out = packed(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype] * k**0.5, rtol=TOLERANCES[dtype])
    assert (packed.in_features, packed.out_features) == (k, n)


def test_leading_shapes_pass_through() -> None:
    packed = PackedLinear(torch.ones(6, 4, dtype=torch.bfloat16))
    assert packed(torch.ones(2, 3, 4, dtype=torch.bfloat16)).shape == (2, 3, 6)
    assert packed(torch.ones(2, 0, 4, dtype=torch.bfloat16)).shape == (2, 0, 6)


def test_the_plain_weight_is_not_kept_beside_the_packed_one() -> None:
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    packed = PackedLinear(weight)
    assert packed.is_packed == can_pack(weight)
    kept = [x for x in vars(packed).values() if isinstance(x, torch.Tensor)]
    assert len(kept) == 1
    assert (kept[0] is weight) != packed.is_packed


def test_fp32_is_not_packed() -> None:
    assert not PackedLinear(torch.ones(4, 4)).is_packed
