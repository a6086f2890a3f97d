"""The floors that the benchmarks print, on sizes that a reader can check by hand."""

import pytest

from millstream.common.model_struct import FULL_ATTENTION, ModelConfig, RopeConfig
from tests.bench import floor
from tests.bench.floor import FORMATS, Rates, Requests, Work


@pytest.fixture
def smollm2() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        weight_format="gguf",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(),
        layer_types=(FULL_ATTENTION,) * 30,
        tie_word_embeddings=True,
        attention_scale=0.125,
    )


RATES = Rates(memory=34.6e9, bf16=420e9, int8=800e9)  # of the 2-core machine that README's numbers are of


def test_work_takes_the_larger_of_arithmetic_and_bytes() -> None:
    rates = Rates(memory=10.0, bf16=100.0, int8=400.0)
    assert Work("a", floor.LINEAR, flops=200, num_bytes=10).seconds(rates) == pytest.approx(2.0)
    assert Work("a", floor.LINEAR, flops=200, num_bytes=30).seconds(rates) == pytest.approx(3.0)
    assert Work("a", floor.LINEAR, flops=200, num_bytes=1, is_int8=True).seconds(rates) == pytest.approx(0.5)


@pytest.mark.parametrize(("concurrency", "tokens_per_s"), [(32, 441), (8, 360), (1, 94)])
def test_the_floors_of_the_random_load_are_the_known_ones(
    smollm2: ModelConfig, concurrency: int, tokens_per_s: float
) -> None:
    requests = Requests(concurrency, prompt_len=256, output_len=128)
    rates = Rates(memory=28e9, bf16=363e9, int8=700e9)
    found = floor.output_tokens_per_s(smollm2, FORMATS["bf16"], requests, rates)
    assert found == pytest.approx(tokens_per_s, rel=0.04)


def test_a_cached_prefix_is_not_computed_and_is_read_once(smollm2: ModelConfig) -> None:
    parts = floor.workload(smollm2, FORMATS["bf16"], Requests(8, 1024 + 64, 2, shared_len=1024))
    by_name = {part.name: part for part in parts}
    alone = floor.workload(smollm2, FORMATS["bf16"], Requests(8, 64, 2))
    assert by_name["prefill linear"].flops == alone[0].flops
    assert by_name["prefill attention"].num_bytes == (1024 + 2 * 8 * 64) * 23040
    assert by_name["decode attention"].num_bytes == (1024 + 8 * 65) * 23040
    assert by_name["decode attention"].flops == 8 * (1024 + 65) * 4 * 30 * 9 * 64


def test_a_decode_step_reads_every_weight_and_the_cache_once(smollm2: ModelConfig) -> None:
    bf16, int4 = FORMATS["bf16"], FORMATS["int4"]
    works = list(floor.decode_step(smollm2, bf16, bf16, batch=1, context_len=320))
    linear = [work for work in works if work.kind == floor.LINEAR]
    assert len(linear) == 4 * 30 + 1
    assert sum(work.flops for work in linear) == 2 * (smollm2.num_parameters - 61 * 576)
    weight_bytes = 2 * (smollm2.num_parameters - 61 * 576)
    assert weight_bytes < sum(work.num_bytes for work in linear) < 1.003 * weight_bytes
    assert sum(work.num_bytes for work in works if work.kind == floor.ATTENTION) == 320 * 23040 + 30 * 4 * 576
    small = list(floor.decode_step(smollm2, int4, int4, batch=1, context_len=320))
    assert floor.seconds_of(small, RATES) < 0.4 * floor.seconds_of(works, RATES)
    mixed = list(floor.decode_step(smollm2, int4, bf16, batch=1, context_len=320))
    assert [work.num_bytes for work in mixed if work.name == "lm_head"] == [linear[-1].num_bytes]


def test_the_formats_store_what_they_say() -> None:
    assert {name: 576 * each.bytes_per_weight for name, each in FORMATS.items()} == {
        "bf16": 2 * 576,
        "int8": 576 + 18 * 2,
        "int4": 288 + 18 * 4,
        "w8a8": 576 + 8,
    }
