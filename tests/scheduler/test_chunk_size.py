"""What a step may compute of prompts: off, fixed, and measured, against made-up machines."""

import math
import random
from collections.abc import Callable

import pytest

from millstream.common.config import AUTO_CHUNK
from millstream.scheduler.chunk_size import (
    FIRST_CHUNK,
    MAX_CHUNK,
    MAX_STREAM_MULTIPLE,
    MAX_STREAM_SECONDS,
    NO_STREAM_SECONDS,
    STREAM_MULTIPLE,
    ChunkSize,
)
from millstream.scheduler.scheduler_config import SchedulerConfig

Machine = Callable[[int, int], float]


def make_chunk_size(chunked_prefill_size: int = AUTO_CHUNK, page_size: int = 16) -> ChunkSize:
    config = SchedulerConfig(
        num_pages=100,
        page_size=page_size,
        vocab_size=100,
        context_len=100,
        max_running_requests=8,
        chunked_prefill_size=chunked_prefill_size,
    )
    return ChunkSize(config)


def cpu(num_prefill_tokens: int, num_decodes: int) -> float:
    return 0.008 + 0.0011 * num_prefill_tokens + 0.0012 * num_decodes


def gpu(num_prefill_tokens: int, num_decodes: int) -> float:
    return 0.009 + 0.00002 * num_prefill_tokens + 0.00003 * num_decodes


def run_steps(chunk: ChunkSize, machine: Machine, num_steps: int, num_decodes: int, *, noise: float = 0.0) -> None:
    """Half of the steps prefill as much as they may."""
    rng = random.Random(0)
    for i in range(num_steps):
        tokens = chunk.tokens(num_decodes, 0, 0.0) or 0
        tokens = tokens if i % 2 else 0
        chunk.on_step(tokens, num_decodes, machine(tokens, num_decodes) * (1 + rng.uniform(-noise, noise)))


def test_minus_one_computes_whole_prompts_and_a_number_is_taken_as_it_is() -> None:
    assert make_chunk_size(-1).tokens(5, 0, 0.0) is None
    assert make_chunk_size(300).tokens(5, 0, 0.0) == 300


def test_before_anything_is_learnt_a_chunk_has_512_tokens() -> None:
    assert make_chunk_size().tokens(8, 0, 0.0) == FIRST_CHUNK == 512


def test_streams_are_spared_from_the_second_prompt_on() -> None:
    chunk = make_chunk_size()
    chunk.on_step(240, 0, cpu(240, 0))
    for _ in range(20):
        chunk.on_step(0, 8, cpu(0, 8))
    tokens = chunk.tokens(8, 0, 0.0) or 0
    assert cpu(tokens, 8) / cpu(0, 8) < 5


@pytest.mark.parametrize("machine", [cpu, gpu])
@pytest.mark.parametrize("num_decodes", [1, 8, 64])
def test_a_step_beside_streams_takes_its_multiple_of_a_step_without_prompts(machine: Machine, num_decodes: int) -> None:
    chunk = make_chunk_size()
    run_steps(chunk, machine, 60, num_decodes, noise=0.1)
    tokens = chunk.tokens(num_decodes, 0, 0.0)
    assert tokens is not None
    if tokens < MAX_CHUNK:
        slowdown = machine(tokens, num_decodes) / machine(0, num_decodes)
        assert 0.75 * STREAM_MULTIPLE < slowdown < 1.25 * STREAM_MULTIPLE


def test_streams_slow_down_within_five_times_and_the_queue_drains_at_two_thirds_of_full_speed() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8, noise=0.1)
    tokens = chunk.tokens(8, 0, 0.0) or 0
    assert cpu(tokens, 8) / cpu(0, 8) < 5
    assert (tokens / cpu(tokens, 8)) / (1 / 0.0011) > 0.67


def test_the_older_the_oldest_waiter_the_more_a_step_computes() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    sizes = [chunk.tokens(8, 0, age) or 0 for age in (0.0, 2.0, 5.0, 10.0, 1000.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] < sizes[3] == sizes[4]
    assert cpu(sizes[4], 8) / cpu(0, 8) < 1.1 * MAX_STREAM_MULTIPLE


def test_the_more_wait_for_each_stream_the_more_a_step_computes() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    sizes = [chunk.tokens(8, num_waiting, 0.0) or 0 for num_waiting in (0, 4, 8, 1000)]
    slowdowns = [cpu(size, 8) / cpu(0, 8) for size in sizes]
    assert slowdowns[:3] == pytest.approx([STREAM_MULTIPLE, 1.5 * STREAM_MULTIPLE, 2 * STREAM_MULTIPLE], rel=0.1)
    assert cpu(sizes[3], 8) == pytest.approx(MAX_STREAM_SECONDS, rel=0.1)


def test_when_no_stream_runs_a_step_may_take_longer() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    run_steps(chunk, cpu, 20, 0)
    tokens = chunk.tokens(0, 0, 0.0) or 0
    assert 0.8 * NO_STREAM_SECONDS < cpu(tokens, 0) < 1.2 * NO_STREAM_SECONDS


@pytest.mark.parametrize("factors", [(4.0, 4.0), (0.5, 0.5), (4.0, 1.0), (0.3, 1.0), (1.0, 3.0)])
def test_it_follows_a_machine_whose_prompts_or_decodes_become_slower_or_faster(factors: tuple[float, float]) -> None:
    def machine(num_prefill_tokens: int, num_decodes: int) -> float:
        return factors[1] * cpu(0, num_decodes) + factors[0] * 0.0011 * num_prefill_tokens

    chunk = make_chunk_size(page_size=1)
    run_steps(chunk, cpu, 100, 8)
    run_steps(chunk, machine, 150, 8)
    slowdown = machine(chunk.tokens(8, 0, 0.0) or 0, 8) / machine(0, 8)
    assert 0.85 * STREAM_MULTIPLE < slowdown < 1.15 * STREAM_MULTIPLE


def test_thousands_of_decode_steps_do_not_make_it_forget_what_prompts_cost() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    before = chunk.tokens(8, 0, 0.0) or 0
    for _ in range(5000):
        chunk.on_step(0, 8, cpu(0, 8))
    assert abs((chunk.tokens(8, 0, 0.0) or 0) - before) <= 16


@pytest.mark.parametrize("seconds", [30.0, 1e-9])
def test_one_step_that_hangs_or_takes_no_time_does_not_change_the_size_for_long(seconds: float) -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    before = chunk.tokens(8, 0, 0.0) or 0
    chunk.on_step(0, 8, seconds)
    run_steps(chunk, cpu, 60, 8)
    assert abs((chunk.tokens(8, 0, 0.0) or 0) - before) <= 16


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_ignored(seconds: float) -> None:
    chunk = make_chunk_size()
    run_steps(chunk, cpu, 60, 8)
    before = chunk.tokens(8, 0, 0.0)
    chunk.on_step(100, 8, seconds)
    assert chunk.tokens(8, 0, 0.0) == before


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_whatever_the_steps_take_a_chunk_is_whole_pages_within_its_bounds(page_size: int) -> None:
    rng = random.Random(page_size)
    for _ in range(30):
        chunk = make_chunk_size(page_size=page_size)
        for _ in range(60):
            tokens = chunk.tokens(rng.randrange(64), rng.randrange(99), rng.uniform(-1, 100))
            assert tokens is not None
            assert page_size <= tokens <= MAX_CHUNK
            assert tokens % page_size == 0
            chunk.on_step(rng.choice((0, 0, tokens)), rng.randrange(64), 10 ** rng.uniform(-5, 2))
