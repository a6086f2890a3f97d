"""Two and three ranks give the tokens of one, and know the same of every row."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import GREEDY, Driver, load_tiny_worker, read, tiny_args
from tests.tp_worker.ranks import run_ranks

SEEDED = SamplingParams(temperature=0.8, top_k=50, seed=99)
CHANGED = SamplingParams(seed=5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={8: 4.0}, bad_words=((8, 8),))
PARAMS = (GREEDY, SEEDED, CHANGED)
PROMPTS = {0: list(range(20, 57)), 1: [7, 8, 9], 2: [299] * 9}


def scenario(worker: Worker) -> list[Any]:
    """What a rank sees of prefills in chunks, decodes, and a row that fails half-way."""
    driver, seen = Driver(worker), []
    for row, ids in PROMPTS.items():
        driver.add(row, ids, PARAMS[row])
    steps: list[tuple[dict[int, range], list[int]]] = [
        ({0: range(20), 1: range(3)}, []),
        ({0: range(20, 37), 2: range(9)}, [1]),
        *[({}, [0, 1, 2])] * 5,
        ({}, [0, 1, 2, 9]),
    ]
    for extends, decodes in steps:
        result = driver.step(extends, decodes)
        if result is not None:
            outcome = read(result)
            seen.append([sorted(outcome.tokens.items()), sorted(outcome.errors)])
    rows = worker.rows
    return [seen, rows.row_lens[:3].tolist(), rows.kv_lens[:3].tolist(), rows.last_tokens[:3].tolist()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_ranks_together_give_the_tokens_of_one(kind: str, size: int, tiny_model: Path, tmp_path: Path) -> None:
    expected = msgspec.msgpack.decode(msgspec.msgpack.encode(scenario(load_tiny_worker(tiny_args(tiny_model)))))
    memory = os.memfd_create("test")
    args = tiny_args(tiny_model, tp_size=size, disable_custom_all_reduce=kind == "gloo", watchdog_timeout=30.0)
    try:
        ranks = run_ranks(size, lambda rank: scenario(load_tiny_worker(args, rank, memory, str(tmp_path))))
    finally:
        os.close(memory)
    assert ranks[0] == expected
    assert all(rank[0] == [] for rank in ranks[1:])
    assert all(rank[1:] == expected[1:] for rank in ranks)


def test_the_ranks_agree_on_the_pages_that_the_whole_model_can_have(tiny_model: Path) -> None:
    memory = os.memfd_create("test")
    args = tiny_args(tiny_model, tp_size=2, max_total_tokens=None, max_running_requests=3)
    pages = run_ranks(2, lambda rank: load_tiny_worker(args, rank, memory).rows.limits.num_pages)
    os.close(memory)
    assert pages == [3 * 256 // 4] * 2
