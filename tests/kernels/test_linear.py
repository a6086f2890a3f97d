"""Linear layers by weight format: packing is exact and undone, what is kept in memory, and what a bad number does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from millstream.kernels.backend import set_backend
from millstream.kernels.huge_pages import REGION_BYTES, into_huge_pages
from millstream.kernels.linear import linear_dense, pack_dense
from millstream.kernels.linear_int4 import GROUP, linear_int4, pack_int4, unpack_int4
from millstream.kernels.linear_int8 import linear_int8, pack_int8, unpack_int8
from millstream.kernels.linear_w8a8 import linear_w8a8, pack_w8a8, quantise_rows, rotate, rotate_weight
from millstream.kernels.weight_panels import into_panels, out_of_panels

SIZES = st.integers(1, 130)


@settings(deadline=None)
@given(SIZES, st.integers(1, 6), st.sampled_from([1, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]))
def test_panels_hold_every_value_once(num_rows: int, num_runs: int, lanes: int, run: int) -> None:
    x_NK = torch.arange(1, num_rows * num_runs * run + 1).view(num_rows, -1)
    panels = into_panels(x_NK, lanes, run)
    assert torch.equal(out_of_panels(panels, num_rows), x_NK)
    assert int(panels.sum()) == int(x_NK.sum())


@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_groups_are_unpacked_to_what_was_packed(lanes: int) -> None:
    generator = torch.Generator().manual_seed(lanes)
    num_rows, num_groups = 100, 3
    shape = (num_rows, num_groups * GROUP)
    d, m = (torch.randn(num_rows, num_groups, generator=generator).half() for _ in range(2))
    q4 = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    q8 = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    each_d, each_m = (x.float().repeat_interleave(GROUP, dim=1) for x in (d, m))
    assert torch.equal(unpack_int4(pack_int4(q4, d, m, lanes=lanes)), q4.float() * each_d + each_m)
    assert torch.equal(unpack_int8(pack_int8(q8, d, lanes=lanes)), q8.float() * each_d)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_kept_in_one_form_and_its_bytes_are_counted(dtype: torch.dtype) -> None:
    weight_NK = torch.randn(96, 64).to(dtype)
    packed = pack_dense(weight_NK, torch.zeros(96, dtype=dtype))
    assert [packed.plain_NK is None, packed.panels is None, packed.blocked is None].count(False) == 1
    assert packed.plain_NK is not weight_NK
    assert packed.num_bytes == (96 * 64 + 96) * dtype.itemsize


def test_with_the_references_forced_a_weight_stays_as_it_is() -> None:
    set_backend("torch")
    weight_NK = torch.randn(8, 6)
    packed, x = pack_dense(weight_NK), torch.randn(3, 6)
    torch.testing.assert_close(linear_dense(x, packed, torch.float32), linear(x, weight_NK))


def test_an_odd_number_of_inputs_and_an_empty_shard_need_no_panels() -> None:
    weight_NK, x = torch.randn(5, 7), torch.randn(2, 7)
    torch.testing.assert_close(linear_dense(x, pack_dense(weight_NK), torch.float32), linear(x, weight_NK))
    assert linear_dense(x, pack_dense(torch.empty(0, 7)), torch.float32).shape == (2, 0)


def test_leading_shapes_pass_through() -> None:
    packed = pack_dense(torch.ones(6, 4, dtype=torch.bfloat16))
    assert linear_dense(torch.ones(2, 3, 4, dtype=torch.bfloat16), packed, torch.float32).shape == (2, 3, 6)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_rows: int) -> None:
    """What keeps a request's tokens the same in every batch, as long as the weight's copy is the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    q = torch.randint(-8, 8, (100, 64), generator=generator, dtype=torch.int8)
    d = torch.rand(100, 2, generator=generator).half()
    dense, int8 = pack_dense(q.bfloat16()), pack_int8(q, d)
    int4, w8a8 = pack_int4((q + 8).to(torch.uint8), d, d), pack_w8a8(q, torch.rand(100, generator=generator))
    for row in range(num_rows):
        alone = x[row : row + 1].contiguous()
        assert torch.equal(linear_dense(alone, dense, x.dtype)[0], linear_dense(x, dense, x.dtype)[row])
        assert torch.equal(linear_int4(alone, int4, x.dtype)[0], linear_int4(x, int4, x.dtype)[row])
        assert torch.equal(linear_int8(alone, int8, x.dtype)[0], linear_int8(x, int8, x.dtype)[row])
        assert torch.equal(linear_w8a8(alone, w8a8, x.dtype)[0], linear_w8a8(x, w8a8, x.dtype)[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_activation_spoils_its_own_row_alone(bad: float) -> None:
    x = torch.randn(4, 64)
    x[1, 3] = bad
    q = torch.ones(50, 64, dtype=torch.int8)
    d = torch.ones(50, 2).half()
    for y in (
        linear_dense(x, pack_dense(torch.ones(50, 64)), torch.float32),
        linear_int4(x, pack_int4(q.to(torch.uint8), d, d), torch.float32),
        linear_int8(x, pack_int8(q, d), torch.float32),
        linear_w8a8(x, pack_w8a8(q, torch.ones(50)), torch.float32),
    ):
        assert not bool(y[1].isfinite().any())
        assert bool(y[[0, 2, 3]].isfinite().all())


def test_a_row_is_quantised_to_the_nearest_whole_number() -> None:
    x = torch.randn(20, 100) * torch.logspace(-20, 20, 20)[:, None]
    q, scale = quantise_rows(x)
    assert q.abs().amax(dim=1).tolist() == [127] * 20
    assert bool(((q * scale - x).abs() <= scale * 0.5001).all())
    zeros, no_scale = quantise_rows(torch.zeros(1, 8))
    assert not bool(zeros.any() | no_scale.any())


@pytest.mark.parametrize("num_inputs", [4, 20, 96, 128, 192])
def test_rotating_inputs_and_weights_leaves_their_product(num_inputs: int) -> None:
    x, weight = torch.randn(5, num_inputs), torch.randn(7, num_inputs)
    torch.testing.assert_close(linear(rotate(x), rotate_weight(weight)), linear(x, weight), atol=1e-4, rtol=0)
    torch.testing.assert_close(rotate(rotate_weight(weight)), weight, atol=1e-5, rtol=0)


def test_one_large_input_costs_the_others_little() -> None:
    """Without the rotation one scale for the row would leave nothing of them: an error of 0.6 here."""
    x, weight = torch.randn(30, 192), torch.randn(50, 192)
    x[:, 70] = 300
    weight[:, 70] = 0.001
    rotated = rotate_weight(weight)
    scale_N = rotated.abs().amax(dim=1) / 127
    packed = pack_w8a8((rotated / scale_N[:, None]).round().to(torch.int8), scale_N)
    expected = linear(x, weight)
    assert (linear_w8a8(x, packed, torch.float32) - expected).norm() < 0.25 * expected.norm()


def test_tensors_in_huge_pages_do_not_share_memory() -> None:
    sizes = (1, 63, 2**20, REGION_BYTES // 2 + 1, REGION_BYTES // 4, REGION_BYTES // 4, REGION_BYTES // 4, 5)
    copies = [into_huge_pages(torch.full((size,), index, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    assert [copy.unique().tolist() for copy in copies] == [[index] for index in range(len(sizes))]
    assert [len(copy) for copy in copies] == list(sizes)
