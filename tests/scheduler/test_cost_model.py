"""The formula of a step's cost, its parts and ranks, and the strict reader of the files."""

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.scheduler.simulation.cost_model import (
    CostModel,
    CostModelError,
    StepCosts,
    decode_cost_model,
    encode_cost_model,
    load_cost_model,
    packaged_names,
)
from millstream.scheduler.simulation.step_shape import StepShape

PLAIN: dict[str, Any] = {
    "description": "round numbers",
    "device": {"bytes_per_second": 1e9, "flops_per_second": 1e12, "usable_memory_bytes": 10_000_000},
    "model": {
        "weight_bytes": 2_000_000,
        "weight_bytes_per_step": 2_000_000,
        "flops_per_token": 1e8,
        "flops_per_sample": 1e7,
        "flops_per_pair": 1e5,
        "kv_bytes_per_token": 1000,
        "num_kv_heads": 3,
        "vocab_size": 1000,
        "context_len": 4096,
    },
    "linear": {"bytes": 0.5, "flops": 0.5},
    "prefill_attention": {"bytes": 1, "flops": 0.1},
    "decode_attention": {"bytes": 0.5, "flops": 1},
    "overheads": {"step_seconds": 1e-3, "prefill_row_seconds": 1e-4, "decode_row_seconds": 1e-5},
    "tensor_parallel": {
        "linear_serial_share": 0.1,
        "collectives_per_step": 10,
        "collective_seconds": 1e-5,
        "collective_bytes_per_token": 1000,
        "link_bytes_per_second": 1e9,
    },
    "surroundings": {
        "request_seconds": 1e-3,
        "output_seconds": 2e-3,
        "message_seconds": 3e-4,
        "gap_seconds": 0,
        "iteration_seconds": 5e-4,
        "iteration_row_seconds": 1e-6,
    },
}
PREFILL = StepShape(
    num_prefill_rows=1, num_prefill_tokens=100, num_prefill_pairs=5050, num_prefill_kv_tokens=100, num_samples=1
)
DECODE = StepShape(num_decode_rows=4, num_decode_kv_tokens=400, num_samples=4)


def plain_costs() -> CostModel:
    return decode_cost_model(json.dumps(PLAIN).encode())


def changed(path: str, value: Any) -> bytes:
    """PLAIN with the field at `a.b` set, or removed where the value is Ellipsis."""
    found = json.loads(json.dumps(PLAIN))
    *folders, name = path.split(".")
    place = found
    for folder in folders:
        place = place[folder]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return json.dumps(found).encode()


def test_a_prefill_is_bound_by_flops_and_a_decode_by_bytes() -> None:
    prefill, decode = StepCosts(plain_costs()).parts(PREFILL), StepCosts(plain_costs()).parts(DECODE)
    assert prefill.linear == pytest.approx((100 * 1e8 + 1e7) / 0.5e12)
    assert prefill.prefill_attention == pytest.approx(5050 * 1e5 / 0.1e12)
    assert prefill.overhead == pytest.approx(1e-3 + 1e-4)
    assert decode.linear == pytest.approx(2e6 / 0.5e9)
    assert decode.decode_attention == pytest.approx(400 * 1000 / 0.5e9)
    assert decode.overhead == pytest.approx(1e-3 + 4e-5)
    assert prefill.decode_attention == decode.prefill_attention == prefill.collectives == decode.collectives == 0
    assert StepCosts(plain_costs()).seconds(DECODE) == pytest.approx(sum(decode))


def test_a_prefill_that_reads_much_and_computes_little_is_bound_by_bytes() -> None:
    shape = StepShape(num_prefill_rows=1, num_prefill_tokens=1, num_prefill_pairs=1, num_prefill_kv_tokens=4000)
    assert StepCosts(plain_costs()).parts(shape).prefill_attention == pytest.approx(4000 * 1000 / 1e9)


def test_ranks_share_the_parts_and_pay_for_collectives() -> None:
    alone, pair = StepCosts(plain_costs(), 1).parts(DECODE), StepCosts(plain_costs(), 2).parts(DECODE)
    assert pair.linear == pytest.approx(alone.linear * (0.1 + 0.9 / 2))
    assert pair.decode_attention == pytest.approx(alone.decode_attention * 2 / 3)  # 3 KV heads are 2 + 1
    assert pair.collectives == pytest.approx(10 * 1e-5 + 10 * 4 * 1000 / 1e9)
    assert pair.overhead == alone.overhead


def test_kv_tokens_are_what_the_weights_leave() -> None:
    costs = plain_costs()
    assert costs.num_kv_tokens(1) == 8000
    assert costs.num_kv_tokens(2) == int(9_000_000 / (1000 * 2 / 3))
    assert decode_cost_model(changed("device.usable_memory_bytes", 1_000_000)).num_kv_tokens(1) == 0


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300, "1", None, ..., True])
@pytest.mark.parametrize(
    "path",
    ["device.bytes_per_second", "model.flops_per_token", "linear.flops", "tensor_parallel.link_bytes_per_second"],
)
def test_a_bad_number_is_refused_and_the_field_is_named(path: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(changed(path, value))
    with pytest.raises(CostModelError) as caught:
        load_cost_model(str(file))
    assert str(file) in str(caught.value)
    if value == value and value != float("inf"):  # noqa: PLR0124 - JSON has no NaN: the parser names the byte
        assert path.rsplit(".", maxsplit=1)[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("linear.bytes", 1.01),
        ("overheads.step_seconds", 1e9),
        ("overheads.step_seconds", -1e-9),
        ("model.num_kv_heads", 0),
        ("model.num_kv_heads", 1.5),
        ("tensor_parallel.linear_serial_share", 2),
        ("surroundings.colour", 1),
    ],
)
def test_what_is_out_of_range_or_unknown_is_refused(path: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(changed(path, value))
    with pytest.raises(CostModelError, match=path.rsplit(".", maxsplit=1)[-1]):
        load_cost_model(str(file))


def test_a_file_that_is_missing_is_named_with_the_packaged_models() -> None:
    with pytest.raises(CostModelError, match=r"no-such: .*h200, smollm2_cpu"):
        load_cost_model("no-such")


@pytest.mark.parametrize("name", packaged_names())
def test_packaged_models_load_and_survive_a_round_trip(name: str) -> None:
    costs = load_cost_model(name)
    assert decode_cost_model(encode_cost_model(costs)) == costs
    assert costs.description
    assert costs.num_kv_tokens(1) > costs.model.context_len / 2
    assert StepCosts(costs).seconds(PREFILL) > 0


def test_the_h200_decodes_an_8b_model_in_some_milliseconds_a_step() -> None:
    costs = StepCosts(load_cost_model("h200"))
    one = costs.seconds(StepShape(num_decode_rows=1, num_decode_kv_tokens=500, num_samples=1))
    many = costs.seconds(StepShape(num_decode_rows=256, num_decode_kv_tokens=256 * 500, num_samples=256))
    assert 0.003 < one < 0.008
    assert one < many < 4 * one
