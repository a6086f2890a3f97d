"""A worker that is driven step by step in this process, without scheduler: its step's parts, and its messages."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from millstream.common.batch_messages import BatchResult, ScheduleBatch, StepAck
from millstream.common.channel import Hub
from millstream.common.config import ChildConfig, ServerArgs
from millstream.common.links import rank_to_scheduler, scheduler_to_rank
from millstream.common.sampling_params import SamplingParams
from millstream.kernels.graph import Graph
from millstream.tp_worker import sampler
from millstream.tp_worker.decoder import Decoder
from millstream.tp_worker.load import load_worker
from millstream.tp_worker.worker import Worker
from tests.bench.step_operators import OperatorTime, time_operators
from tests.tp_worker.driver import Driver

GREEDY = SamplingParams(temperature=0.0, seed=0)
NUM_MESSAGES = 200
WARM_UP_STEPS = 3


class WorkerStep(NamedTuple):
    """A decode step of `batch` rows: medians in seconds."""

    whole: float
    sampling: float
    messages: float
    operators: list[OperatorTime]
    context_len: int  # in the middle of what was measured


class Stopwatch:
    """Stands for a function and keeps the seconds of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*args, **kwargs)
        self.seconds.append(time.perf_counter() - start)
        return result


def load(args: ServerArgs) -> Worker:
    """A worker with the server's flags, in this process."""
    with tempfile.TemporaryDirectory() as directory:
        config = ChildConfig(name="tp_worker.0", rank=0, run_dir=directory, instance_id=0, args=args)
        return load_worker(config, lambda loaded, total: None)[0]


def measure_step(worker: Worker, batch: int, context_len: int, num_steps: int) -> WorkerStep:
    """Prefill `batch` rows, then time decode steps around a context; the rows are freed at the end."""
    driver, rng = Driver(worker), random.Random(batch)
    prompt_len = max(1, context_len - WARM_UP_STEPS - num_steps // 2)
    vocab_size = worker.rows.limits.vocab_size
    for row in range(batch):
        driver.add(row, [rng.randrange(vocab_size) for _ in range(prompt_len)], GREEDY)
        driver.step({row: range(prompt_len)})
    rows = list(range(batch))
    whole: list[float] = []
    with stopwatch_on_sampling() as sampling:
        for _ in range(WARM_UP_STEPS + num_steps):
            schedule_batch = driver.batch(decodes=rows)
            start = time.perf_counter()
            result = worker.run_step(schedule_batch)
            whole.append(time.perf_counter() - start)
            driver.next_step += 1
    assert result is not None
    step = WorkerStep(
        whole=statistics.median(whole[WARM_UP_STEPS:]),
        sampling=statistics.median(sampling.seconds[WARM_UP_STEPS:]),
        messages=message_seconds(schedule_batch, result),
        operators=time_operators(recorded_step(worker, batch), num_steps),
        context_len=context_len,
    )
    for row in rows:
        driver.free(row)
    driver.step()
    return step


def recorded_step(worker: Worker, batch: int) -> Graph:
    """The decoder's recorded decode step: so many tokens, requests and rows that sample."""
    decoder = worker._model
    assert isinstance(decoder, Decoder)
    recorded = decoder._graphs._recorded.get((batch, batch, batch))
    if recorded is None:
        raise SystemExit(
            "a step runs operator by operator here: there is no C compiler, or no C version of all operators"
        )
    return recorded.graph


@contextmanager
def stopwatch_on_sampling() -> Iterator[Stopwatch]:
    """Around the operator that the worker samples with."""
    sample = sampler.sample
    sampler.sample = stopwatch = Stopwatch(sample)
    try:
        yield stopwatch
    finally:
        sampler.sample = sample


def message_seconds(batch: ScheduleBatch, result: BatchResult) -> float:
    """What the worker's loop spends on receiving a batch and sending its result and acknowledgement."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        scheduler, worker = Hub(Path(directory), 1), Hub(Path(directory), 1)
        results = scheduler.open_receiver(rank_to_scheduler(0), BatchResult | StepAck)
        batches = worker.open_receiver(scheduler_to_rank(0), ScheduleBatch)
        to_rank, to_scheduler = scheduler.open_sender(scheduler_to_rank(0)), worker.open_sender(rank_to_scheduler(0))
        times = []
        for _ in range(NUM_MESSAGES):
            to_rank.send(batch)
            worker.wait()
            time.sleep(0.0005)  # it has come: waiting is not counted
            start = time.perf_counter()
            worker.wait()
            received = batches.drain()
            to_scheduler.send(result)
            to_scheduler.send(StepAck(0, batch.step, worker.num_dropped))
            times.append(time.perf_counter() - start)
            assert len(received) == 1
            results.drain()
        for hub in (scheduler, worker):
            hub.close()
    return statistics.median(times)
