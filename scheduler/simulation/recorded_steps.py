"""The steps of a recorded schedule: what each computed, how long it took, and when it came and went."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ...common.batch_messages import BatchResult, ScheduleBatch
from ...common.messages import TokenizedGenerateReqInput
from ..recording.recording import Entry, Event, RecordingError
from .step_shape import RowLengths, StepShape, read_int32


class RecordedStep(NamedTuple):
    """Times are the scheduler's clock, `seconds` the worker's: `planned` and `returned` lie outside of it."""

    shape: StepShape
    seconds: float
    planned: float
    returned: float


class RecordedRun(NamedTuple):
    """The steps in order, and how long each request took from its arrival at the server to the scheduler."""

    steps: list[RecordedStep]
    request_seconds: list[float]


def read_steps(entries: Iterable[Entry], max_running_requests: int) -> RecordedRun:
    """Follow the batch stream; `entries` are those of recording.py. RecordingError for rows that there are not."""
    rows = RowLengths(max_running_requests)
    batches: deque[tuple[float, ScheduleBatch]] = deque()  # whose results are not back
    run = RecordedRun([], [])
    now = 0.0
    for entry in entries:
        message = entry.message
        if isinstance(entry, Event):
            now = entry.now
        if isinstance(message, ScheduleBatch):
            batches.append((now, message))
        elif isinstance(message, TokenizedGenerateReqInput):
            run.request_seconds.append(now - message.arrival)
        elif isinstance(message, BatchResult):
            try:
                run.steps.extend(_end_step(rows, batches, message, now))
            except (IndexError, ValueError) as error:
                raise RecordingError(
                    f"line {entry.line}: step {message.step} does not fit the recorded rows"
                ) from error
    return run


def _end_step(
    rows: RowLengths, batches: deque[tuple[float, ScheduleBatch]], result: BatchResult, now: float
) -> Iterable[RecordedStep]:
    """Apply the batches up to that of the result; a batch without rows has none."""
    while batches and batches[0][1].step <= result.step:
        planned, batch = batches.popleft()
        shape = rows.begin(batch).shape
        if batch.step == result.step:
            rows.end(read_int32(result.rows), read_int32(result.row_lens))
            yield RecordedStep(shape, result.step_seconds, planned, now)
