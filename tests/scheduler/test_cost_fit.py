"""The fit finds the costs that made a recording, in spite of outliers; its solver finds the best non-negative answer."""

from itertools import combinations

import msgspec
import numpy as np
import pytest

from millstream.scheduler.recording.recording import read_recording
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_fit import FitError, fit_cost_model, fit_errors
from millstream.scheduler.simulation.cost_model import (
    CostModel,
    Efficiency,
    Overheads,
    StepCosts,
    Surroundings,
    load_cost_model,
)
from millstream.scheduler.simulation.distribution import parse_lengths
from millstream.scheduler.simulation.non_negative_least_squares import FloatArray, non_negative_least_squares
from millstream.scheduler.simulation.recorded_steps import RecordedRun, read_steps
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.step_shape import StepShape
from millstream.scheduler.simulation.workload import Trace, Workload, make_trace

BASE = load_cost_model("smollm2_cpu")
TRUE = msgspec.structs.replace(
    BASE,
    linear=Efficiency(0.6, 0.7),
    prefill_attention=Efficiency(1.0, 0.15),
    decode_attention=Efficiency(0.4, 1.0),
    overheads=Overheads(0.004, 0.002, 0.0005),
    surroundings=Surroundings(0.007, 0.002, 0.0004, 0.0009, 0.0003, 0.0),
)
PROBES = (
    StepShape(1, 64, 64 * 65 // 2, 64, 0, 0, 1),
    StepShape(2, 500, 2 * 250 * 251 // 2, 500, 0, 0, 2),
    StepShape(0, 0, 0, 0, 1, 300, 1),
    StepShape(0, 0, 0, 0, 30, 30 * 400, 30),
    StepShape(1, 256, 256 * 257 // 2, 256, 10, 10 * 300, 11),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A recording of the scheduler with workers of the TRUE costs, at low and at high load."""
    path = tmp_path_factory.mktemp("fit") / "recording"
    config = SchedulerConfig(
        num_pages=4000, page_size=16, vocab_size=BASE.model.vocab_size + 1, context_len=8192, max_running_requests=32
    )
    scheduler = RecordedScheduler(config, ScheduleRecorder(path, config))
    lengths = {"input_len": parse_lengths("exponential:120"), "output_len": parse_lengths("exponential:16")}
    low, high = (
        make_trace(Workload(num_requests=30, request_rate=rate, context_len=8192, seed=seed, **lengths)).requests
        for rate, seed in ((0.5, 1), (50.0, 2))
    )
    for request in high:
        request.arrival = (request.arrival or 0.0) + 200.0
    Simulation(scheduler, TRUE, 1, Trace([*low, *high])).run()
    scheduler.recorder.close()
    recording = read_recording(path)
    return read_steps(recording, recording.header.config.max_running_requests)


def assert_like_the_truth(fitted: CostModel, tolerance: float) -> None:
    for probe in PROBES:
        assert StepCosts(fitted).seconds(probe) == pytest.approx(StepCosts(TRUE).seconds(probe), rel=tolerance)


def test_the_fit_recovers_the_costs_of_every_kind_of_step(run: RecordedRun) -> None:
    fitted = fit_cost_model(BASE, run, "fitted")
    assert_like_the_truth(fitted, 0.02)
    assert {error.kind for error in fit_errors(fitted, run)} == {"prefill", "decode", "mixed"}
    assert all(error.median_percent < 1 for error in fit_errors(fitted, run))
    assert all(error.median_percent > 10 for error in fit_errors(BASE, run) if error.kind == "decode")


def test_the_fit_recovers_what_happens_outside_the_steps(run: RecordedRun) -> None:
    found, true = fit_cost_model(BASE, run, "fitted").surroundings, TRUE.surroundings
    assert found.request_seconds == pytest.approx(true.request_seconds, rel=0.01)
    assert found.gap_seconds == pytest.approx(true.gap_seconds, rel=0.05)
    assert found.message_seconds == pytest.approx(true.message_seconds, rel=0.3)
    assert found.output_seconds == BASE.surroundings.output_seconds


def test_some_large_steps_that_took_far_too_long_change_little(run: RecordedRun) -> None:
    rng = np.random.default_rng(1)
    steps = [
        step._replace(seconds=20 * step.seconds) if step.shape.num_decode_rows > 5 and rng.random() < 0.25 else step
        for step in run.steps
    ]
    fitted = fit_cost_model(BASE, run._replace(steps=steps), "fitted")
    excess = sum(step.seconds for step in steps) / sum(step.seconds for step in run.steps)
    assert excess > 1.2
    seconds = [StepCosts(fitted).seconds(probe) / StepCosts(TRUE).seconds(probe) for probe in PROBES]
    assert seconds == pytest.approx([excess] * len(PROBES), rel=0.05)  # the shape stays, the time in all is right


def test_a_row_is_followed_from_its_prompt_through_its_outputs(run: RecordedRun) -> None:
    first = next(index for index, step in enumerate(run.steps) if step.shape.num_prefill_tokens)
    num_known = run.steps[first].shape.num_prefill_tokens
    decodes = [step.shape.num_decode_kv_tokens for step in run.steps[first + 1 : first + 6]]
    assert decodes == [num_known + count for count in range(1, 6)]


def test_too_few_steps_or_one_kind_alone_are_refused(run: RecordedRun) -> None:
    with pytest.raises(FitError, match="at least 20 steps"):
        fit_cost_model(BASE, run._replace(steps=run.steps[:5]), "")
    decodes = [step for step in run.steps if step.shape.kind == "decode"]
    with pytest.raises(FitError, match="both prefill and decode"):
        fit_cost_model(BASE, run._replace(steps=decodes), "")


def best_by_trying(matrix: FloatArray, values: FloatArray) -> float:
    """The least squared error over all sets of free unknowns whose solution is not negative."""
    errors = [float(values @ values)]
    for count in range(1, matrix.shape[1] + 1):
        for free in combinations(range(matrix.shape[1]), count):
            part = matrix[:, list(free)]
            solution = np.linalg.lstsq(part, values, rcond=None)[0]
            if (solution >= 0).all():
                errors.append(float(((part @ solution - values) ** 2).sum()))
    return min(errors)


@pytest.mark.parametrize("seed", range(60))
def test_the_solver_finds_the_best_answer_that_is_not_negative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(12, 1))
    matrix = (common + 0.5 * rng.normal(size=(12, 5))) * 10.0 ** rng.integers(-4, 4, 5)
    if seed % 4 == 0:
        matrix[:, 2] = 0
    values = common[:, 0] + 0.5 * rng.normal(size=12)
    solution = non_negative_least_squares(matrix, values)
    assert (solution >= 0).all()
    assert ((matrix @ solution - values) ** 2).sum() <= best_by_trying(matrix, values) * (1 + 1e-6)
