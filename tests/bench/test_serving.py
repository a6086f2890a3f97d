"""What tests/bench/serving.py prints: exact prompts, latencies beside a long prompt, ratios, and what makes it fail."""

from typing import Any

import pytest

from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.common.tokenizer import load_tokenizer
from millstream.tokenizer_manager.commands.bench_client import Sample
from tests.bench import serving_report
from tests.bench.floor import Rates
from tests.bench.serving_loads import LONG_LEN, beside_long, make_prompts, workloads
from tests.bench.serving_prompts import PromptMaker

RATES = Rates(memory=34.6e9, bf16=420e9, int8=800e9)


def stream(start: float, ttft: float, *gaps: float) -> Sample:
    return Sample(start=start, ttft=ttft, latency=ttft + sum(gaps), gaps=list(gaps), prompt_tokens=256)


def result(server: str, tokens_per_s: float, ttft: float, round_number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "round": round_number,
        "server": server,
        "workload": "random",
        "concurrency": 32,
        "wanted_prompt_tokens": 256,
        "prompt_tokens_off_by": 0,
        "num_requests": 64,
        "num_errors": 0,
        "first_error": None,
        "output_tokens": 64 * 128,
        "output_tokens_per_s": tokens_per_s,
        "cached_tokens": 0,
        "ttft_ms": {"p50": ttft},
        "tpot_ms": {"p50": 50.0},
        "itl_ms": {"p99": 90.0},
        "client_cpu_share": 0.05,
        "server_cpu_seconds": {"main": 0.5, "scheduler": 0.3, "detokenizer": 0.2, "tp_worker.0": 9.0},
        **more,
    }


def test_prompts_have_exact_lengths_and_no_common_beginning() -> None:
    tokenizer = load_tokenizer(find_model("smollm2"))
    maker, again = PromptMaker(tokenizer, seed=1), PromptMaker(tokenizer, seed=1)
    chosen = workloads(("random", "shared", "long"), (1, 8), scale=1.0)
    prompts = [make_prompts(workload, maker) for workload in chosen]
    assert prompts == [make_prompts(workload, again) for workload in chosen]
    random_1, random_8, shared, long = ([tokenizer.encode(each) for each in texts] for texts in prompts)
    assert {len(ids) for ids in random_1 + random_8} == {256}
    assert [len(ids) for ids in long] == [256] * 9 + [LONG_LEN]
    assert {len(ids) for ids in shared} == {1024 + 64}
    assert len({tuple(ids[:1024]) for ids in shared}) == 1
    assert len({ids[1024] for ids in shared}) == len(shared)
    cold = random_1 + random_8 + long + shared[:1]
    assert len({ids[0] for ids in cold}) == len(cold)


def test_the_streams_beside_a_long_prompt() -> None:
    """Gaps of 0.01; the long prompt arrives at 1.105 and has its first token at 1.6."""
    before, after = [0.01] * 10, [0.02] * 10
    streams = [stream(0.0, 1.0, *before, 0.3, 0.2, *after), stream(0.5, 0.5, *before, 0.1, 0.4, *after)]
    long = Sample(start=1.105, ttft=0.45, latency=0.46, prompt_tokens=LONG_LEN, cached_tokens=0)
    found = beside_long(streams, long)
    assert (found["num_usual"], found["num_during"]) == (40, 4)
    assert found["during_itl_ms"] == {"p50": 250.0, "p99": 400.0}
    assert found["usual_itl_ms"] == {"p50": 15.0, "p99": 20.0}
    assert (found["during_p99_to_usual_p99"], found["during_p99_to_usual_p50"]) == (20.0, 26.67)
    assert found["long_error"] is None
    late = Sample(start=1.105, ttft=9.0, latency=9.1, prompt_tokens=LONG_LEN)
    assert "ended before" in beside_long(streams, late)["long_error"]


def test_ratios_are_those_of_medians_to_the_best_peer() -> None:
    config = load_model_config(find_model("smollm2"), "auto")
    rounds = [
        each
        for number, rate in ((1, 400.0), (2, 380.0), (3, 10.0))
        for each in (
            result("ours", rate, 1000.0, number),
            result("llama", 90.0, 12000.0, number),
            result("vllm", 190.0, 4000.0, number),
        )
    ]
    ours, llama, vllm = serving_report.load_table(rounds, config, RATES).splitlines()[2:]
    cells = [cell.strip() for cell in ours.split("|")]
    assert cells[3:6] == ["ours", "380.0", "2.00x"]
    assert cells[7:9] == ["1000", "0.25x"]
    assert cells[6].startswith("bf16 5")
    assert cells[6].count("(0.7") == 2
    assert "2.00x" not in llama + vllm
    assert serving_report.others_share(rounds[0]["server_cpu_seconds"]) == pytest.approx(0.1)


def test_what_was_not_measured_as_it_should_is_a_problem() -> None:
    good = result("ours", 400.0, 1000.0)
    assert serving_report.problems([good, {**good, "workload": "warm", "cached_tokens": 4080}]) == []
    for fault in (
        {"cached_tokens": 1},
        {"prompt_tokens_off_by": 1},
        {"num_errors": 1},
        {"long_error": "the streams ended"},
        {"workload": "long", "long_cached_tokens": 16},
    ):
        assert len(serving_report.problems([{**good, **fault}])) == 1
