"""The cut of a model over ranks: every tensor is covered, and the ranks together give the logits of one."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.common.model_error import ModelError
from millstream.common.model_struct import ModelConfig, RopeConfig
from millstream.common.tensor_parallel import (
    Range,
    TensorShard,
    allowed_tp_sizes,
    check_tp_size,
    shard_plan,
    tensor_shards,
)
from millstream.tp_worker.communicator import Communicator
from tests.model.run_decoder import load_decoder, run
from tests.model.thread_ranks import run_rank_threads
from tests.model.tiny_models import expected_logits, prompt, save_model


def make_config(**fields: Any) -> ModelConfig:
    """SmolLM2's shape, changed by `fields`."""
    shape: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "weight_format": "gguf",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope": RopeConfig(),
        "layer_types": ("full_attention",) * 2,
        "attention_scale": 0.125,
        "mlp_shard_unit": 32,
    }
    return ModelConfig(**{**shape, **fields})


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models of any shape."""
    kv_heads = draw(st.integers(1, 12))
    unit = draw(st.sampled_from([1, 32, 256]))
    flags = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "post_norms", "tie_word_embeddings")
    return make_config(
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([2, 64, 80])),
        intermediate_size=unit * draw(st.integers(8, 40)),
        vocab_size=draw(st.integers(100, 5000)),
        mlp_shard_unit=unit,
        **{flag: draw(st.booleans()) for flag in flags},
    )


def covers_once(ranges: list[Range], size: int) -> bool:
    """Whether the ranges, in order, are 0..size without gap or overlap."""
    ends = [0, *(part.end for part in ranges)]
    return ends[-1] == size and all(part.start == end for part, end in zip(ranges, ends, strict=False))


@given(configs(), st.data())
def test_the_shards_of_all_ranks_partition_every_tensor(config: ModelConfig, data: st.DataObject) -> None:
    tp_size = data.draw(st.sampled_from(allowed_tp_sizes(config)))
    ranks = [tensor_shards(config, shard_plan(config, rank, tp_size)) for rank in range(tp_size)]
    repeats = max(1, tp_size // config.num_kv_heads)
    for name, first in ranks[0].items():
        shards = [rank[name] for rank in ranks]
        if any(part in name for part in (".k_proj.", ".v_proj.")):
            shards = shards[::repeats]
        axis_sizes = list(zip(axes(first), first.shape, strict=True))
        whole = [all(axes(shard)[i] == Range(0, size) for shard in shards) for i, (_, size) in enumerate(axis_sizes)]
        cut = [i for i, is_whole in enumerate(whole) if not is_whole]
        assert len(cut) <= 1
        for i in cut:
            assert covers_once([axes(shard)[i] for shard in shards], first.shape[i])


def axes(shard: TensorShard) -> list[Range]:
    """Rows, and columns where there are some."""
    return [shard.rows] if shard.columns is None else [shard.rows, shard.columns]


@given(configs(), st.data())
def test_query_heads_lie_with_the_kv_head_that_they_read(config: ModelConfig, data: st.DataObject) -> None:
    tp_size = data.draw(st.sampled_from(allowed_tp_sizes(config)))
    group = config.num_heads // config.num_kv_heads
    for rank in range(tp_size):
        plan = shard_plan(config, rank, tp_size)
        local_group = plan.heads.size // plan.kv_heads.size
        for i in range(plan.heads.size):
            assert (plan.heads.start + i) // group == plan.kv_heads.start + i // local_group


@given(configs())
def test_the_tensors_of_one_rank_are_the_parameters_of_the_model(config: ModelConfig) -> None:
    shards = tensor_shards(config, shard_plan(config, 0, 1))
    assert sum(torch.Size(shard.local_shape).numel() for shard in shards.values()) == config.num_parameters


@pytest.mark.parametrize(("rank", "kv_heads"), [(0, Range(0, 2)), (1, Range(2, 3))])
def test_three_kv_heads_over_two_ranks_are_two_and_one(rank: int, kv_heads: Range) -> None:
    plan = shard_plan(make_config(), rank, 2)
    assert (plan.kv_heads, plan.heads) == (kv_heads, kv_heads.times(3))
    assert plan.mlp.size == 768
    assert plan.padded_vocab == 24576


@pytest.mark.parametrize(("unit", "expected"), [(32, Range(0, 512)), (256, Range(0, 512)), (1024, Range(0, 512))])
def test_the_mlp_is_cut_between_quantisation_blocks_where_that_is_possible(unit: int, expected: Range) -> None:
    assert shard_plan(make_config(mlp_shard_unit=unit), 0, 3).mlp == expected


def test_a_tp_size_that_does_not_fit_is_refused_with_the_allowed_sizes() -> None:
    assert allowed_tp_sizes(make_config()) == [1, 2, 3, 9]
    with pytest.raises(ModelError, match=r"--tp-size 4 .* allowed are 1, 2, 3, 9"):
        check_tp_size(make_config(), 4)


@pytest.mark.parametrize("tp_size", [2, 3, 6])
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "llama-tied", "qwen3", "gemma3"])
def test_ranks_together_give_the_logits_of_one(variant: str, tp_size: int, tmp_path: Path) -> None:
    save_model(variant, tmp_path)

    def work(communicator: Communicator) -> torch.Tensor | None:
        decoder = load_decoder(tmp_path, rank=communicator.rank, tp_size=communicator.size, communicator=communicator)
        return run(decoder, prompt(), 17)

    first, *others = run_rank_threads(tp_size, work)
    assert first is not None
    assert others == [None] * (tp_size - 1)
    torch.testing.assert_close(first, expected_logits(variant), atol=1e-4, rtol=0)


def test_the_plan_of_a_config_depends_on_nothing_else() -> None:
    config = msgspec.structs.replace(make_config(), vocab_size=1001)
    assert [shard_plan(config, rank, 3).vocab for rank in range(3)] == [
        Range(0, 384),
        Range(384, 768),
        Range(768, 1001),
    ]
