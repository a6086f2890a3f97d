"""Fit a cost model to a recorded run: the rates and overheads that explain its steps; bytes and FLOPs are the base's.

The unknowns are the seconds of a step, of a prefill and of a decode row, of a token through the linear layers, of a
(query, key) pair of a prefill, and of a KV token that a decode row reads. The linear part costs max(tokens, T) tokens,
because under T tokens the weights' bytes decide: T is searched on a grid, and for each T the others are a non-negative
least-squares fit. Errors are relative to the measured time, so that steps which took far too long (a machine does other
work, too) count little, and each kind of step counts as much as the others. At last everything is scaled by one factor,
so that the steps take as long as measured in all: throughput follows from means, and other work only adds to them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .cost_model import CostModel, Device, Efficiency, Overheads, StepCosts, Surroundings
from .non_negative_least_squares import FloatArray, non_negative_least_squares
from .recorded_steps import RecordedRun, RecordedStep

MIN_STEPS = 20
MAX_KNEE = 1024  # tokens: T of the linear part
NUM_KNEES = 25
NUM_DIGITS = 5
HEADROOM = 4.0  # of a fitted device's ceilings over what its linear part reaches


class FitError(ValueError):
    """The recording does not say enough; the message says what is missing."""


class KindError(msgspec.Struct, frozen=True):
    """How far the fit is from the recorded steps of a kind."""

    kind: str
    num_steps: int
    median_percent: float
    p90_percent: float
    total_percent: float  # of the time of all steps together, signed


def fit_cost_model(base: CostModel, run: RecordedRun, description: str) -> CostModel:
    """The base with fitted rates, overheads and surroundings; FitError where there are too few steps.

    The run must have had one rank: how parts shrink with the ranks is the base's.
    """
    steps = [step for step in run.steps if step.seconds > 0]
    if len(steps) < MIN_STEPS:
        raise FitError(f"a fit needs at least {MIN_STEPS} steps, and the recording has {len(steps)}")
    if not any(step.shape.num_prefill_tokens for step in steps) or not any(
        step.shape.num_decode_rows for step in steps
    ):
        raise FitError("a fit needs both prefill and decode steps")
    knee, seconds = _fit(steps, base.model.flops_per_sample / base.model.flops_per_token)
    fixed, prefill_row, decode_row, token, pair, kv_token = seconds.tolist()
    model = base.model
    flops, bytes_ = model.flops_per_token / token, model.weight_bytes_per_step / (token * knee)
    device = Device(HEADROOM * bytes_, HEADROOM * flops, base.device.usable_memory_bytes)
    prefill_flops = model.flops_per_pair / pair if pair else device.flops_per_second
    decode_bytes = model.kv_bytes_per_token / kv_token if kv_token else device.bytes_per_second
    fitted = msgspec.structs.replace(
        base,
        description=description,
        device=device,
        linear=Efficiency(1 / HEADROOM, 1 / HEADROOM),
        prefill_attention=Efficiency(1.0, min(1.0, prefill_flops / device.flops_per_second)),
        decode_attention=Efficiency(min(1.0, decode_bytes / device.bytes_per_second), 1.0),
        overheads=Overheads(fixed, prefill_row, decode_row),
        surroundings=_fit_surroundings(base, run),
    )
    return msgspec.convert(_rounded(msgspec.to_builtins(fitted)), CostModel)


def fit_errors(costs: CostModel, run: RecordedRun) -> list[KindError]:
    """The model's errors on a run, by the kind of step."""
    step_costs = StepCosts(costs)
    found = []
    for kind in ("prefill", "decode", "mixed"):
        steps = [step for step in run.steps if step.shape.kind == kind and step.seconds > 0]
        if not steps:
            continue
        measured = np.array([step.seconds for step in steps])
        modelled = np.array([step_costs.seconds(step.shape) for step in steps])
        percent = 100 * np.abs(modelled / measured - 1)
        total = 100 * (float(modelled.sum()) / float(measured.sum()) - 1)
        figures = (float(np.median(percent)), float(np.percentile(percent, 90)), total)
        found.append(KindError(kind, len(steps), *(round(figure, 2) for figure in figures)))
    return found


def _fit(steps: Sequence[RecordedStep], sample_tokens: float) -> tuple[float, FloatArray]:
    """The knee T in tokens, and the seconds of the six unknowns; `sample_tokens` is what a sample costs in tokens."""
    measured = np.array([step.seconds for step in steps])
    columns = np.array([_columns(step, sample_tokens) for step in steps], np.float64)
    kinds = [step.shape.kind for step in steps]
    counts = Counter(kinds)
    weights = np.array([1 / counts[kind] for kind in kinds])
    knees = np.geomspace(1, MAX_KNEE, NUM_KNEES)
    candidates = [_fit_knee(columns, measured, weights, knee) for knee in knees.tolist()]
    best = int(np.argmin([candidate.error for candidate in candidates]))
    between = np.geomspace(knees[max(best - 1, 0)], knees[min(best + 1, NUM_KNEES - 1)], NUM_KNEES)
    candidates += [_fit_knee(columns, measured, weights, knee) for knee in between.tolist()]
    chosen = min(candidates, key=lambda candidate: candidate.error)
    if not math.isfinite(chosen.error):
        raise FitError("the steps' times do not depend on their tokens")
    columns[:, 3] = np.maximum(columns[:, 3], chosen.knee)
    return chosen.knee, chosen.seconds * (measured.sum() / (columns @ chosen.seconds).sum())


class _Candidate(NamedTuple):
    error: float  # infinite where tokens cost nothing
    knee: float
    seconds: FloatArray


def _fit_knee(columns: FloatArray, measured: FloatArray, weights: FloatArray, knee: float) -> _Candidate:
    matrix = columns.copy()
    matrix[:, 3] = np.maximum(matrix[:, 3], knee)
    root = np.sqrt(weights)
    seconds = non_negative_least_squares(matrix * (root / measured)[:, None], root)
    error = float(weights @ (matrix @ seconds / measured - 1) ** 2) if seconds[3] > 0 else math.inf
    return _Candidate(error, knee, seconds)


def _columns(step: RecordedStep, sample_tokens: float) -> tuple[float, ...]:
    shape = step.shape
    num_tokens = shape.num_prefill_tokens + shape.num_decode_rows + sample_tokens * shape.num_samples
    return (
        1.0,
        shape.num_prefill_rows,
        shape.num_decode_rows,
        num_tokens,
        shape.num_prefill_pairs,
        shape.num_decode_kv_tokens,
    )


def _fit_surroundings(base: CostModel, run: RecordedRun) -> Surroundings:
    """Medians of what the recording shows outside the steps; what only a client sees stays the base's."""
    lags, gaps = [], []
    for before, step in zip([None, *run.steps], run.steps, strict=False):
        if before is not None and step.planned <= before.returned:
            gaps.append(step.returned - before.returned - step.seconds)
        else:
            lags.append(step.returned - step.planned - step.seconds)
    old = base.surroundings
    message = (_median(lags) - old.iteration_seconds) / 2 if lags else old.message_seconds
    return msgspec.structs.replace(
        old,
        request_seconds=_median(run.request_seconds) if run.request_seconds else old.request_seconds,
        message_seconds=max(0.0, message),
        gap_seconds=_median(gaps) if gaps else old.gap_seconds,
    )


def _rounded(value: Any) -> Any:
    """To the digits that a fit can know."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return float(f"{value:.{NUM_DIGITS}g}") if isinstance(value, float) else value


def _median(seconds: list[float]) -> float:
    return max(0.0, float(np.median(seconds)))
