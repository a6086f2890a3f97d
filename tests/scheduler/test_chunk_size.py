"""What a step may compute of prompts: off, fixed, and measured, against made-up machines."""

import random

import pytest

from millstream.common.config import AUTO_CHUNK
from millstream.common.finish_reason import FINISH_ABORT
from millstream.scheduler.chunk_size import (
    FIRST_CHUNK,
    MAX_CHUNK,
    MAX_GROWTH,
    MAX_STREAM_MULTIPLE,
    MAX_STREAM_SECONDS,
    MIN_CHUNK,
    MIN_LEARNT_STEPS,
    NO_STREAM_SECONDS,
    STREAM_MULTIPLE,
    WAITER_RAISE,
    ChunkBudget,
    ChunkSize,
)
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.step_cost import StepWork, count_pairs
from tests.scheduler.admission_set_up import make_adder, make_req
from tests.scheduler.harness import Harness
from tests.scheduler.test_step_cost import CPU, GPU, Machine, make_machine

PAGE_SIZE = 16
PROMPT_LEN = 8000
FAILING = 49


def make_chunk_size(chunked_prefill_size: int = AUTO_CHUNK, page_size: int = PAGE_SIZE) -> ChunkSize:
    config = SchedulerConfig(
        num_pages=100,
        page_size=page_size,
        vocab_size=100,
        context_len=100,
        max_running_requests=8,
        chunked_prefill_size=chunked_prefill_size,
    )
    return ChunkSize(config)


def chunk_at(chunk: ChunkSize, start: int, num_decodes: int, num_behind: int = 0, waited: float = 0.0) -> StepWork:
    """The step that goes on with a long prompt at `start`, as the scheduler fills it."""
    budget = chunk.budget(num_decodes, num_behind, waited)
    assert budget is not None
    adder = make_adder(
        PagePool(PROMPT_LEN // PAGE_SIZE, PAGE_SIZE),
        chunk=budget.tokens,
        attention_len=budget.attention_len,
        max_input=PROMPT_LEN,
    )
    req = make_req(PROMPT_LEN)
    adder.pool.init_next_round_input(req)
    adder.pool.grow(req, start)
    adder.add_chunked_req(req)
    start, end = req.extend_range
    return StepWork(end - start, count_pairs(start, end), num_decodes)


def run_steps(chunk: ChunkSize, machine: Machine, num_steps: int, num_decodes: int, *, noise: float = 0.0) -> None:
    """Half of the steps go on with a long prompt as far as they may."""
    rng, start = random.Random(0), 0
    for i in range(num_steps):
        work = StepWork(0, 0, num_decodes)
        if i % 2:
            work = chunk_at(chunk, start, num_decodes)
            start = (start + work.num_prefill_tokens) % (PROMPT_LEN // 2 // PAGE_SIZE * PAGE_SIZE)
        chunk.on_step(work, machine(work) * (1 + rng.uniform(-noise, noise)))


def slowdown(machine: Machine, work: StepWork) -> float:
    """How many times a step without prompts this one takes."""
    return machine(work) / machine(StepWork(0, 0, work.num_decodes))


def one_page(machine: Machine, work: StepWork) -> float:
    """What a page more would cost, in steps without prompts."""
    tokens, pairs, decodes = work
    more = StepWork(tokens + PAGE_SIZE, pairs + PAGE_SIZE * pairs // tokens, decodes)
    return slowdown(machine, more) - slowdown(machine, work)


def test_minus_one_computes_whole_prompts_and_a_number_counts_the_decode_rows_in() -> None:
    assert make_chunk_size(-1).budget(5, 0, 0.0) is None
    assert make_chunk_size(300).budget(5, 0, 0.0) == ChunkBudget(295)


def test_before_anything_is_learnt_a_chunk_has_512_tokens() -> None:
    assert make_chunk_size().budget(8, 0, 0.0) == ChunkBudget(FIRST_CHUNK) == (512, float("inf"))


@pytest.mark.parametrize("first_len", [1, 20, 240])
def test_streams_are_spared_from_the_second_prompt_on(first_len: int) -> None:
    chunk = make_chunk_size()
    first = StepWork(first_len, count_pairs(0, first_len), 0)
    chunk.on_step(first, CPU(first))
    for _ in range(20):
        chunk.on_step(StepWork(0, 0, 8), CPU(StepWork(0, 0, 8)))
    assert slowdown(CPU, chunk_at(chunk, 0, 8)) < 7
    run_steps(chunk, CPU, 6, 8)
    assert slowdown(CPU, chunk_at(chunk, 0, 8)) < 5


def test_a_chunk_is_never_much_larger_than_what_was_seen() -> None:
    chunk = make_chunk_size()
    first = StepWork(40, count_pairs(0, 40), 0)
    chunk.on_step(first, 1e-6)
    for _ in range(20):
        chunk.on_step(StepWork(0, 0, 8), CPU(StepWork(0, 0, 8)))
    assert chunk_at(chunk, 0, 8).num_prefill_tokens <= MAX_GROWTH * 40


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("num_decodes", [1, 8, 64])
@pytest.mark.parametrize("start", [0, 1024, 3584])
def test_a_step_beside_streams_is_at_most_a_page_over_its_multiple(
    machine: Machine, num_decodes: int, start: int
) -> None:
    chunk = make_chunk_size()
    run_steps(chunk, machine, 200, num_decodes)
    work = chunk_at(chunk, start, num_decodes)
    if work.num_prefill_tokens < MAX_CHUNK // 2:
        page = one_page(machine, work)
        assert STREAM_MULTIPLE - page < slowdown(machine, work) < STREAM_MULTIPLE + page


def test_noise_moves_it_little() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, CPU, 200, 8, noise=0.15)
    for start in (0, 1024, 3584):
        assert 0.7 * STREAM_MULTIPLE < slowdown(CPU, chunk_at(chunk, start, 8)) < 1.2 * STREAM_MULTIPLE


def test_late_chunks_of_a_long_prompt_are_smaller_but_never_nothing() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, CPU, 200, 8)
    sizes = [chunk_at(chunk, start, 8).num_prefill_tokens for start in (0, 2048, 4096, 7984)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[2] >= PAGE_SIZE
    for _ in range(200):
        chunk.on_step(StepWork(PAGE_SIZE, 7984 * PAGE_SIZE, 8), 10.0)
    assert chunk_at(chunk, 7984, 8).num_prefill_tokens == PAGE_SIZE


def test_the_older_the_oldest_waiter_the_more_a_step_computes() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, CPU, 60, 8)
    steps = [chunk_at(chunk, 0, 8, waited=age) for age in (-1.0, 0.0, 2.0, 5.0, 10.0, 1000.0)]
    sizes = [work.num_prefill_tokens for work in steps]
    assert sizes == sorted(sizes)
    assert sizes[0] == sizes[1] < sizes[3] < sizes[4] == sizes[5]
    assert slowdown(CPU, steps[-1]) < 1.1 * MAX_STREAM_MULTIPLE


def test_the_more_wait_for_each_stream_the_more_a_step_computes() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, CPU, 100, 8)
    steps = [chunk_at(chunk, 0, 8, num_behind) for num_behind in (0, 2, 4, 1000)]
    raised = [STREAM_MULTIPLE * (1 + WAITER_RAISE * each / 8) for each in (0, 2, 4)]
    assert [slowdown(CPU, work) for work in steps[:3]] == pytest.approx(raised, rel=0.15)
    assert CPU(steps[3]) == pytest.approx(MAX_STREAM_SECONDS, rel=0.15)


def test_when_no_stream_runs_a_step_may_take_longer() -> None:
    chunk = make_chunk_size()
    run_steps(chunk, CPU, 60, 8)
    run_steps(chunk, CPU, 20, 0)
    for start in (0, 4000):
        assert 0.8 * NO_STREAM_SECONDS < CPU(chunk_at(chunk, start, 0)) < 1.2 * NO_STREAM_SECONDS


def test_a_step_is_worth_its_overhead() -> None:
    machine = make_machine(0.002, 0.0, 0.03, 0.0005, 0.0)
    chunk = make_chunk_size()
    run_steps(chunk, machine, 100, 8)
    assert chunk_at(chunk, 0, 8).num_prefill_tokens * 0.0005 > 0.8 * 0.03


@pytest.mark.parametrize("factors", [(4.0, 4.0), (2.0, 2.0), (0.5, 0.5), (4.0, 1.0), (0.3, 1.0), (1.0, 3.0)])
def test_it_follows_a_machine_whose_prompts_or_decodes_become_slower_or_faster(factors: tuple[float, float]) -> None:
    def machine(work: StepWork) -> float:
        without = CPU(StepWork(0, 0, work.num_decodes))
        return factors[1] * without + factors[0] * (CPU(work) - without)

    chunk = make_chunk_size()
    run_steps(chunk, CPU, 100, 8)
    run_steps(chunk, machine, 300, 8)
    work = chunk_at(chunk, 0, 8)
    page = one_page(machine, work)
    assert 0.9 * STREAM_MULTIPLE - page < slowdown(machine, work) < 1.1 * STREAM_MULTIPLE + page


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_whatever_the_steps_take_a_budget_is_within_its_bounds(page_size: int) -> None:
    rng = random.Random(page_size)
    for _ in range(20):
        chunk = make_chunk_size(page_size=page_size)
        for _ in range(40):
            budget = chunk.budget(rng.randrange(64), rng.randrange(99), rng.uniform(-1, 100))
            assert budget is not None
            assert max(page_size, MIN_CHUNK) <= budget.tokens <= MAX_CHUNK
            assert budget.attention_len > 999
            num_tokens = rng.choice((0, 0, int(budget.tokens)))
            work = StepWork(num_tokens, count_pairs(0, num_tokens), rng.randrange(64))
            chunk.on_step(work, 10 ** rng.uniform(-5, 2))


@pytest.mark.parametrize("does_fail", [True, False])
def test_nothing_is_learnt_from_steps_in_which_a_row_failed(does_fail: bool) -> None:
    harness = Harness(num_pages=200, chunked_prefill_size=AUTO_CHUNK, failing_token_id=FAILING if does_fail else None)
    for index in range(2 * MIN_LEARNT_STEPS):
        client = harness.ask(str(index), [index] * 300 + [FAILING], 1)
        harness.run()
        assert isinstance(client.ends[0].finish_reason, FINISH_ABORT) is does_fail
    is_as_at_first = harness.state.chunk_size.budget(0, 0, 0.0) == ChunkBudget(FIRST_CHUNK)
    assert is_as_at_first is does_fail
