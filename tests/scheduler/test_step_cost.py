"""What the scheduler learns of the workers' times, against made-up machines."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.scheduler.simulation.non_negative_least_squares import non_negative_least_squares
from millstream.scheduler.step_cost import FORGETTING, Fit, StepCost, StepWork, count_pairs

Machine = Callable[[StepWork], float]


def make_machine(
    base: float, per_decode: float, overhead: float, per_token: float, per_pair: float
) -> Callable[[StepWork], float]:
    def seconds(work: StepWork) -> float:
        tokens, pairs, decodes = work
        return base + per_decode * decodes + (overhead if tokens else 0.0) + per_token * tokens + per_pair * pairs

    return seconds


CPU = make_machine(0.010, 0.0003, 0.005, 0.0006, 0.15e-6)
GPU = make_machine(0.008, 0.00003, 0.0005, 0.00002, 1e-9)


def draw_work(rng: random.Random, num_decodes: int) -> StepWork:
    """Half of the steps go on with a prompt somewhere."""
    if rng.random() < 0.5:
        return StepWork(0, 0, num_decodes)
    start, num_tokens = rng.randrange(4096), rng.randrange(16, 512)
    return StepWork(num_tokens, count_pairs(start, start + num_tokens), num_decodes)


def learn(cost: StepCost, machine: Machine, num_steps: int, *, noise: float = 0.0, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        work = draw_work(rng, rng.randrange(1, 17))
        cost.learn(work, machine(work) * (1 + rng.uniform(-noise, noise)))


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.1, 0.1)])
def test_it_foretells_steps_of_any_make_up(machine: Machine, noise: float, tolerance: float) -> None:
    cost = StepCost()
    learn(cost, machine, 100, noise=noise)
    for work in (StepWork(0, 0, 1), StepWork(0, 0, 8), StepWork(64, count_pairs(0, 64), 8)):
        assert cost.seconds(work) == pytest.approx(machine(work), rel=tolerance)
    for start in (0, 1000, 3900):
        work = StepWork(100, count_pairs(start, start + 100), 8)
        assert cost.seconds(work) == pytest.approx(machine(work), rel=tolerance)


def test_it_tells_tokens_from_pairs_and_from_what_any_prompt_costs() -> None:
    cost = StepCost()
    learn(cost, CPU, 200)
    assert cost.per_token == pytest.approx(0.0006, rel=0.02)
    assert cost.per_pair == pytest.approx(0.15e-6, rel=0.02)
    assert cost.overhead == pytest.approx(0.005, rel=0.1)
    assert cost.without_prompts(32) == pytest.approx(0.010 + 0.0003 * 32, rel=0.02)


@pytest.mark.parametrize("num_tokens", [1, 30, 256, 4096])
def test_one_prompt_is_enough_for_a_token_to_cost_something_and_late_ones_more(num_tokens: int) -> None:
    cost = StepCost()
    for _ in range(5):
        cost.learn(StepWork(0, 0, 1), CPU(StepWork(0, 0, 1)))
    work = StepWork(num_tokens, count_pairs(0, num_tokens), 0)
    cost.learn(work, CPU(work))
    assert cost.per_token > 0
    assert cost.per_pair > 0
    assert cost.seconds(work) == pytest.approx(CPU(work), rel=0.05)


@pytest.mark.parametrize("factor", [0.3, 2.0, 5.0])
def test_it_follows_a_machine_that_becomes_faster_or_slower(factor: float) -> None:
    cost = StepCost()
    learn(cost, CPU, 200)
    learn(cost, lambda work: factor * CPU(work), 200, seed=1)
    for work in (StepWork(0, 0, 8), StepWork(64, count_pairs(2000, 2064), 8)):
        assert cost.seconds(work) == pytest.approx(factor * CPU(work), rel=0.1)


def test_steps_of_one_kind_do_not_make_it_forget_the_other() -> None:
    cost = StepCost()
    learn(cost, CPU, 100)
    mixed, alone = StepWork(64, count_pairs(500, 564), 8), StepWork(0, 0, 8)
    for _ in range(1000):
        cost.learn(alone, CPU(alone))
    assert cost.seconds(mixed) == pytest.approx(CPU(mixed), rel=0.02)
    assert cost.without_prompts(32) == pytest.approx(CPU(StepWork(0, 0, 32)), rel=0.02)
    for _ in range(1000):
        cost.learn(mixed, CPU(mixed))
    assert cost.seconds(alone) == pytest.approx(CPU(alone), rel=0.02)
    late = StepWork(64, count_pairs(4000, 4064), 8)
    assert cost.seconds(late) == pytest.approx(CPU(late), rel=0.05)


@pytest.mark.parametrize("seconds", [30.0, 1e-9])
def test_one_step_that_hangs_or_takes_no_time_changes_little(seconds: float) -> None:
    cost = StepCost()
    learn(cost, CPU, 100)
    work = StepWork(64, count_pairs(500, 564), 8)
    cost.learn(work, seconds)
    assert cost.seconds(work) == pytest.approx(CPU(work), rel=0.4)
    learn(cost, CPU, 100, seed=2)
    assert cost.seconds(work) == pytest.approx(CPU(work), rel=0.03)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_ignored(seconds: float) -> None:
    cost = StepCost()
    learn(cost, CPU, 100)
    work = StepWork(64, count_pairs(0, 64), 8)
    before = cost.seconds(work)
    cost.learn(work, seconds)
    assert cost.seconds(work) == before


def test_whatever_steps_take_costs_are_finite_and_not_negative() -> None:
    rng = random.Random(0)
    for _ in range(20):
        cost = StepCost()
        for _ in range(40):
            cost.learn(draw_work(rng, rng.randrange(64)), 10 ** rng.uniform(-5, 2))
            for value in (cost.without_prompts(9), cost.per_token, cost.per_pair, cost.overhead):
                assert math.isfinite(value)
                assert value >= 0


def lengths(largest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from((0, 1, 64, 512, largest)), st.integers(0, largest))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            lengths(131072),
            lengths(16384),
            lengths(4096),
            st.one_of(st.sampled_from((0.0, 5e-324, 1e-9, 1e-6, 3e-5, 1e6, 1e300)), st.floats(0.0, 1e6)),
            st.integers(1, 12),
        ),
        max_size=8,
    )
)
@example([(0, 8192, 0, 3e-5, 12)])
@example([(0, 512, 0, 1e-6, 12)])
@example([(0, 0, 4096, 1e-9, 12), (131072, 16384, 4096, 1e-9, 12)])
def test_extreme_steps_never_break_it(steps: list[tuple[int, int, int, float, int]]) -> None:
    cost = StepCost()
    for start, num_tokens, num_decodes, seconds, repeats in steps:
        work = StepWork(num_tokens, count_pairs(start, start + num_tokens), num_decodes)
        for _ in range(repeats):
            cost.learn(work, seconds)
            values = (cost.without_prompts(9), cost.per_token, cost.per_pair, cost.overhead, cost.seconds(work))
            assert all(math.isfinite(value) and value >= 0 for value in values)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(8192, 3e-5), (512, 1e-6), (16384, 1e-4)])
def test_fast_steps_are_learnt_too(num_tokens: int, seconds: float) -> None:
    """What holds the weights is lost beside such steps."""
    cost, work = StepCost(), StepWork(num_tokens, count_pairs(0, num_tokens), 0)
    for _ in range(40):
        cost.learn(work, seconds)
        assert cost.seconds(work) == pytest.approx(seconds, rel=0.01)


def test_a_fit_is_the_best_one_with_weights_that_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        truth, fit = rng.normal(size=3), Fit(3)
        inputs = rng.uniform(10, 100, (50, 3))
        values = inputs @ truth + rng.normal(size=50)
        for row, value in zip(inputs.tolist(), values.tolist(), strict=True):
            fit.learn(row, value, 1.0)
        weights = np.sqrt(FORGETTING ** np.arange(49, -1, -1))
        best = non_negative_least_squares(inputs * weights[:, None], values * weights)
        errors = [float((((inputs @ each - values) * weights) ** 2).sum()) for each in (np.array(fit.weights), best)]
        assert errors[0] <= 1.01 * errors[1]


def test_pairs_are_counted() -> None:
    for start, end in ((0, 0), (0, 1), (0, 7), (5, 6), (5, 12)):
        assert count_pairs(start, end) == sum(position + 1 for position in range(start, end))
