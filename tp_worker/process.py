"""The TP worker process: one rank of the model. It loads, says that it is ready, then runs the batch stream in order."""

import gc
import time
from pathlib import Path

from ..common.batch_messages import ScheduleBatch, StepAck
from ..common.channel import Hub, Receiver, Sender
from ..common.config import ChildConfig
from ..common.links import rank_to_scheduler, scheduler_to_rank
from ..common.messages import LoadProgress
from .load import load_worker
from .worker import Worker

PROGRESS_SECONDS = 0.1


def run(config: ChildConfig) -> None:
    """Wire and run one rank; returns never, ends by an exception or with its parent."""
    hub = Hub(Path(config.run_dir), config.instance_id)
    to_scheduler = hub.open_sender(rank_to_scheduler(config.rank))
    batches: Receiver[ScheduleBatch] = hub.open_receiver(scheduler_to_rank(config.rank), ScheduleBatch)
    try:
        worker, ready = load_worker(config, _ProgressReport(to_scheduler, config.rank))
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection needs to look at it again
        if worker.grammars is not None:
            worker.grammars.wake = hub.open_waker()
        to_scheduler.send(ready)
        run_batches(hub, batches, to_scheduler, worker, config.rank)
    finally:
        hub.close()


def run_batches(hub: Hub, batches: Receiver[ScheduleBatch], to_scheduler: Sender, worker: Worker, rank: int) -> None:
    """The loop: every batch in order, its result on its way before the next is looked at."""
    while True:
        hub.wait()
        for grammar in worker.take_ready_grammars():
            to_scheduler.send(grammar)
        for batch in batches.drain():
            result = worker.run_step(batch)
            ack = StepAck(rank, batch.step, hub.num_dropped)
            to_scheduler.send(*([ack] if result is None else [result, ack]))
        if hub.is_full:
            raise RuntimeError(f"the scheduler takes no results: {hub.num_pending} messages are waiting")


class _ProgressReport:
    """Tells the scheduler about loading, ten times a second at most, and of the end."""

    def __init__(self, to_scheduler: Sender, rank: int) -> None:
        self._to_scheduler = to_scheduler
        self._rank = rank
        self._next_time = 0.0

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now >= self._next_time or loaded_bytes >= total_bytes:
            self._next_time = now + PROGRESS_SECONDS
            self._to_scheduler.send(LoadProgress(self._rank, loaded_bytes, total_bytes))
