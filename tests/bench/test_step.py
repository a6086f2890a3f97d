"""Which steps of a recorded run tests/bench/step.py counts."""

import pytest

from millstream.scheduler.simulation.recorded_steps import RecordedStep
from millstream.scheduler.simulation.step_shape import StepShape
from tests.bench.step_server import full_steps

DECODE = StepShape(num_decode_rows=8, num_decode_kv_tokens=8 * 300, num_samples=8)
MIXED = StepShape(num_prefill_rows=1, num_prefill_tokens=64, num_decode_rows=8, num_samples=8)
FEWER = StepShape(num_decode_rows=7, num_decode_kv_tokens=7 * 300, num_samples=7)


def steps(*shapes_and_walls: tuple[StepShape, float]) -> list[RecordedStep]:
    """Each returns so long after the one before, and takes the worker 1 ms less."""
    now, made = 0.0, []
    for shape, wall in shapes_and_walls:
        now += wall
        made.append(RecordedStep(shape, wall - 0.001, now - wall, now))
    return made


def test_only_full_decode_steps_behind_another_count() -> None:
    run = steps(
        (DECODE, 9.0), (DECODE, 0.010), (MIXED, 0.5), (DECODE, 7.0), (DECODE, 0.012), (DECODE, 0.014), (FEWER, 1.0)
    )
    found = full_steps(run, batch=8)
    assert found.num_steps == 3
    assert found.wall == pytest.approx(0.012)
    assert found.inside == pytest.approx(0.011)
    assert found.context_len == 300


def test_a_run_without_full_steps_says_so() -> None:
    with pytest.raises(SystemExit, match="outputs are too short"):
        full_steps(steps((FEWER, 0.01), (FEWER, 0.01)), batch=8)
