"""Rounding of weights, against bounds and against what llama.cpp's own quantiser makes of the same values."""

import gguf
import pytest
import torch

from millstream.tp_worker.quantise import QuantisedTensor, quantise_int4, quantise_int8, quantise_rows, stack

GROUP = 32


def weights(num_rows: int = 40, num_columns: int = 192) -> torch.Tensor:
    """Normal values, with rows of very different sizes and a few far out."""
    torch.manual_seed(4)
    x = torch.randn(num_rows, num_columns) * torch.logspace(-3, 2, num_rows)[:, None]
    x[::7, ::31] *= 9
    return x


def group_errors(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Squared error of each group."""
    return (found - x).square().view(len(x), -1, GROUP).sum(-1)


def test_int8_rounds_to_the_nearest_step_of_each_group() -> None:
    x = weights()
    tensor = quantise_int8(x)
    assert tensor.m_NG is None
    assert tensor.q_NK.abs().max() == 127
    steps = x.view(len(x), -1, GROUP).abs().amax(-1, keepdim=True) / 127
    errors = (tensor.dequantise(torch.float32) - x).abs().view(len(x), -1, GROUP)
    assert bool((errors <= 0.57 * steps).all())  # half a step, and what float16 takes from 127 steps


def test_int4_is_at_least_as_close_as_llama_cpps_q4_1() -> None:
    x = weights()
    tensor = quantise_int4(x)
    assert (int(tensor.q_NK.min()), int(tensor.q_NK.max())) == (0, 15)
    kind = gguf.GGMLQuantizationType.Q4_1
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind))
    ours, others = group_errors(tensor.dequantise(torch.float32), x), group_errors(theirs, x)
    assert float((ours / others).mean()) < 0.92
    assert float((ours / others).max()) < 1.1


def test_values_that_are_on_a_grid_already_stay() -> None:
    grid = 0.25 * torch.randint(0, 16, (8, 64)).float() - 1.5
    grid.view(8, -1, GROUP)[..., :2] = torch.tensor([-1.5, 2.25])
    assert torch.equal(quantise_int4(grid).dequantise(torch.float32), grid)
    whole = torch.randint(-127, 128, (8, 64)).float()
    whole.view(8, -1, GROUP)[..., 0] = 127
    assert torch.equal(quantise_int8(whole).dequantise(torch.float32), whole)


@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_groups_of_one_value_keep_it(value: float) -> None:
    x = torch.full((2, 64), value)
    for tensor in (quantise_int8(x), quantise_int4(x)):
        torch.testing.assert_close(tensor.dequantise(torch.float32), x, atol=0, rtol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows(value: float) -> None:
    x = weights(3, 64)
    x[1, 40] = value
    for tensor in (quantise_int8(x), quantise_int4(x)):
        is_finite = tensor.dequantise(torch.float32).isfinite()
        assert not is_finite[1, GROUP:].any()
        assert is_finite[[0, 2]].all()
        assert is_finite[1, :GROUP].all()
    _, scale_N = quantise_rows(x)
    assert scale_N.isfinite().tolist() == [True, False, True]


def test_rows_round_to_the_nearest_step_of_the_row() -> None:
    x = weights()
    x[5] = 0
    q_NK, scale_N = quantise_rows(x)
    assert q_NK.abs().max() == 127
    assert not q_NK[5].any()
    assert bool(((q_NK * scale_N[:, None] - x).abs() <= 0.5001 * scale_N[:, None]).all())


def test_stacking_puts_tensors_above_each_other_and_fills_up_with_zeros() -> None:
    first, second = quantise_int4(weights(5)), quantise_int4(weights(3) + 1)
    stacked = stack([first, second], 11).dequantise(torch.float32)
    expected = torch.cat([first.dequantise(torch.float32), second.dequantise(torch.float32), torch.zeros(3, 192)])
    assert torch.equal(stacked, expected)


def test_dequantised_values_are_rounded_once() -> None:
    tensor = QuantisedTensor(torch.tensor([[11] * GROUP], dtype=torch.uint8), *torch.tensor([[[0.3]], [[-1.7]]]).half())
    exact = 11 * tensor.d_NG.double() + tensor.m_NG.double()
    assert torch.equal(tensor.dequantise(torch.bfloat16), exact.float().bfloat16().expand(1, GROUP))
