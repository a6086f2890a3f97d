"""The scheduler process: links, the ready handshake, and the loop."""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..common.channel import Hub, Receiver, Sender
from ..common.config import ChildConfig, ServerArgs
from ..common.messages import (
    BatchResult,
    FromRank,
    LoadProgress,
    SchedulerReady,
    StepAck,
    TextEnded,
    ToScheduler,
    WorkerReady,
    detokenizer_to_scheduler,
    manager_to_scheduler,
    rank_to_scheduler,
    scheduler_to_detokenizer,
    scheduler_to_manager,
    scheduler_to_rank,
)
from .invariants import broken_invariants
from .load import SnapshotClock
from .scheduler import Scheduler, SchedulerConfig
from .watchdog import Watchdog

logger = logging.getLogger(__name__)


class Links(NamedTuple):
    """The ends of all links of this process."""

    from_manager: Receiver[ToScheduler]
    from_detokenizer: Receiver[TextEnded]
    from_ranks: list[Receiver[FromRank]]
    to_manager: Sender
    to_detokenizer: Sender
    to_ranks: list[Sender]


def run(config: ChildConfig) -> None:
    """Run until the process is ended from outside, or until something that must end the server raises."""
    hub = Hub(Path(config.run_dir), config.instance_id)
    try:
        links = _open_links(hub, config.args.tp_size)
        workers = wait_for_workers(hub, links, config.args.tp_size)
        scheduler = Scheduler(scheduler_config(config.args, workers))
        links.to_manager.send(_ready(scheduler.config, workers))
        SchedulerProcess(hub, links, scheduler, config.args).loop()
    finally:
        hub.close()


class SchedulerProcess:
    """The loop and what it needs beside the scheduler."""

    def __init__(self, hub: Hub, links: Links, scheduler: Scheduler, args: ServerArgs) -> None:
        self.hub = hub
        self.links = links
        self.scheduler = scheduler
        self.watchdog = Watchdog(args.tp_size, args.watchdog_timeout)
        self.snapshot_clock = SnapshotClock(time.monotonic())
        self._is_checked = True  # the invariants, since the last time that anything ran

    def loop(self) -> None:
        """Wait, receive, take results, plan, send; blocks while there is nothing to do."""
        while True:
            self.hub.wait(int(self.snapshot_clock.seconds_left(time.monotonic()) * 1000) + 1)
            now = time.monotonic()
            self.receive(now)
            self.plan(now)
            self.send_output()
            self.send_snapshot(now)
            self.watchdog.check(now, is_full=self.hub.is_full)

    def receive(self, now: float) -> None:
        """Requests first, then results: what has arrived by now takes part in the next step."""
        for message in (*self.links.from_manager.drain(), *self.links.from_detokenizer.drain()):
            self.scheduler.handle(message)
            self.snapshot_clock.on_news()
        for receiver in self.links.from_ranks:
            for answer in receiver.drain():
                if isinstance(answer, BatchResult):
                    self.scheduler.process_batch_result(answer)
                    self.watchdog.on_result(answer.step, now)
                    self.send_output()
                elif isinstance(answer, StepAck):
                    self.watchdog.on_ack(answer.rank, answer.step, now)

    def plan(self, now: float) -> None:
        """Send steps until as many are in flight as may be; the same bytes go to every rank."""
        if self.hub.is_full:
            logger.warning("a link is full (%d frames wait): no step is planned", self.hub.num_pending)
            return
        while (batch := self.scheduler.get_next_batch_to_run(now)) is not None:
            encoded = msgspec.msgpack.encode(batch)
            for sender in self.links.to_ranks:
                sender.send_encoded(encoded)
            self.watchdog.on_sent(batch.step, now)
            self.snapshot_clock.on_news()
            self._is_checked = False

    def send_output(self) -> None:
        """Tokens and ends to the detokenizer, answers to the tokenizer manager."""
        output = self.scheduler.take_output()
        if output is not None:
            self.links.to_detokenizer.send(output)
        for reply in self.scheduler.take_replies():
            self.links.to_manager.send(reply)

    def send_snapshot(self, now: float) -> None:
        """The heartbeat, when it is due. After a second of idleness the invariants are checked once."""
        if self.snapshot_clock.seconds_left(now) > 0:
            return
        if not self._is_checked and not self.snapshot_clock.has_news and not self.scheduler.requests:
            self._is_checked = True
            for problem in broken_invariants(self.scheduler):
                logger.error("broken invariant: %s", problem)
        self.links.to_manager.send(self.scheduler.take_snapshot(self.hub.num_dropped))
        self.snapshot_clock.on_sent(now)


def wait_for_workers(hub: Hub, links: Links, tp_size: int) -> list[WorkerReady]:
    """Forward the progress of loading until every rank is ready; returns what they said, by rank."""
    ready: dict[int, WorkerReady] = {}
    while len(ready) < tp_size:
        hub.wait()
        for message in (message for receiver in links.from_ranks for message in receiver.drain()):
            if isinstance(message, LoadProgress):
                links.to_manager.send(message)
            elif isinstance(message, WorkerReady):
                ready[message.rank] = message
    return [ready[rank] for rank in range(tp_size)]


def scheduler_config(args: ServerArgs, workers: list[WorkerReady]) -> SchedulerConfig:
    """What the flags ask and the ranks can do; RuntimeError when the ranks do not agree."""
    first = workers[0]
    for worker in workers:
        if (worker.vocab_size, worker.context_len) != (first.vocab_size, first.context_len):
            raise RuntimeError(f"rank {worker.rank} has another vocabulary or context than rank 0")
        if [group.name for group in worker.kv_groups] != [group.name for group in first.kv_groups]:
            raise RuntimeError(f"rank {worker.rank} has other KV groups than rank 0")
    if len(first.kv_groups) != 1:
        raise RuntimeError(f"the scheduler serves one KV group, and the workers have {len(first.kv_groups)}")
    num_pages = min(worker.kv_groups[0].num_pages for worker in workers)
    if num_pages < 1:
        raise RuntimeError("the workers have no room for a KV page")
    return SchedulerConfig(
        num_pages=num_pages,
        page_size=args.page_size,
        vocab_size=first.vocab_size,
        context_len=first.context_len,
        max_running_requests=min(args.max_running_requests, *(worker.max_running_requests for worker in workers)),
        chunked_prefill_size=args.chunked_prefill_size,
        max_prefill_tokens=args.max_prefill_tokens,
        schedule_conservativeness=args.schedule_conservativeness,
        disable_overlap_schedule=args.disable_overlap_schedule,
        disable_radix_cache=args.disable_radix_cache,
    )


def _ready(config: SchedulerConfig, workers: list[WorkerReady]) -> SchedulerReady:
    return SchedulerReady(
        num_kv_pages=config.num_pages,
        page_size=config.page_size,
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        max_running_requests=config.max_running_requests,
        weight_bytes=sum(worker.weight_bytes for worker in workers),
    )


def _open_links(hub: Hub, tp_size: int) -> Links:
    return Links(
        from_manager=hub.open_receiver(manager_to_scheduler(), ToScheduler),
        from_detokenizer=hub.open_receiver(detokenizer_to_scheduler(), TextEnded),
        from_ranks=[hub.open_receiver(rank_to_scheduler(rank), FromRank) for rank in range(tp_size)],
        to_manager=hub.open_sender(scheduler_to_manager()),
        to_detokenizer=hub.open_sender(scheduler_to_detokenizer()),
        to_ranks=[hub.open_sender(scheduler_to_rank(rank)) for rank in range(tp_size)],
    )
