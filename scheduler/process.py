"""The scheduler process: links, the ready handshake, and the loop."""

import gc
import logging
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from ..common.batch_messages import BatchResult, GrammarReady, StepAck
from ..common.channel import Hub
from ..common.config import ChildConfig, ServerArgs
from ..common.messages import ControlReqOutput
from .load import SnapshotClock
from .recording.schedule_recorder import make_scheduler
from .scheduler import Scheduler
from .start_up import Links, open_links, ready_message, scheduler_config, wait_for_workers
from .watchdog import Watchdog

logger = logging.getLogger(__name__)


def run(config: ChildConfig) -> None:
    """Run until the process is ended from outside, or until something that must end the server raises."""
    hub = Hub(Path(config.run_dir), config.instance_id)
    try:
        links = open_links(hub, config.args.tp_size)
        workers = wait_for_workers(hub, links, config.args.tp_size)
        with closing(make_scheduler(scheduler_config(config.args, workers), config.args.record_schedule)) as scheduler:
            links.to_manager.send(ready_message(scheduler.config, workers))
            gc.freeze()  # what is loaded stays: collections need not walk it
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
        self._dropped_by_rank: dict[int, int] = {}
        self._is_full = False
        self._is_checked = True  # the invariants, since the last time that anything ran

    def loop(self) -> None:
        """Wait, receive, take results, plan, send; blocks while there is nothing to do."""
        while True:
            self.wait()
            now = time.monotonic()
            self.receive(now)
            self.plan(now)
            self.send_output(now)
            self.send_snapshot(now)
            self.watchdog.check(now, is_full=self.hub.is_full)

    def wait(self) -> None:
        """Until something arrives, or the next snapshot or time limit is due."""
        now = time.monotonic()
        seconds, deadline = self.snapshot_clock.seconds_left(now), self.scheduler.next_deadline()
        if deadline is not None and not self._is_full:
            seconds = max(0.0, min(seconds, deadline - now))
        self.hub.wait(int(seconds * 1000) + 1)

    def receive(self, now: float) -> None:
        """Requests first, then results: what has arrived by now takes part in the next step."""
        for message in (*self.links.from_manager.drain(), *self.links.from_detokenizer.drain()):
            self.scheduler.handle(message, now)
            self.snapshot_clock.on_news()
        for receiver in self.links.from_ranks:
            for answer in receiver.drain():
                if isinstance(answer, BatchResult):
                    self.scheduler.process_batch_result(answer, now)
                    self.watchdog.on_result(answer.step, now)
                    self.snapshot_clock.on_news()
                    self.send_output(now)
                elif isinstance(answer, GrammarReady):
                    self.scheduler.handle(answer, now)
                    self.snapshot_clock.on_news()
                elif isinstance(answer, StepAck):
                    self.watchdog.on_ack(answer.rank, answer.step, now)
                    self._dropped_by_rank[answer.rank] = answer.dropped_frames_total

    def plan(self, now: float) -> None:
        """Send steps until as many are in flight as may be; the same bytes go to every rank."""
        was_full, self._is_full = self._is_full, self.hub.is_full
        if self._is_full:
            if not was_full:
                logger.error("a link is full (%d frames wait): no step is planned", self.hub.num_pending)
            return
        for batch in iter(partial(self.scheduler.get_next_batch_to_run, now), None):
            encoded = msgspec.msgpack.encode(batch)
            for sender in self.links.to_ranks:
                sender.send_encoded(encoded)
            self.watchdog.on_sent(batch.step, now, has_result=bool(batch.extend_rows or batch.decode_rows))
            self.snapshot_clock.on_news()
            self._is_checked = False

    def send_output(self, now: float) -> None:
        """Tokens and ends to the detokenizer, answers to the tokenizer manager: after a change, a snapshot that shows it."""
        output = self.scheduler.take_output()
        if output is not None:
            self.links.to_detokenizer.send(output)
        replies = self.scheduler.take_replies()
        if any(isinstance(reply, ControlReqOutput) for reply in replies):
            self._send_snapshot(now)
        for reply in replies:
            self.links.to_manager.send(reply)

    def send_snapshot(self, now: float) -> None:
        """The heartbeat, when it is due. After a second of idleness the invariants are checked once."""
        if self.snapshot_clock.seconds_left(now) > 0:
            return
        if self.scheduler.is_idle and not self._is_checked and not self.snapshot_clock.has_news:
            self._is_checked = True
            self.scheduler.check_when_idle()
        self._send_snapshot(now)

    def _send_snapshot(self, now: float) -> None:
        num_dropped = self.hub.num_dropped + sum(self._dropped_by_rank.values())
        self.links.to_manager.send(self.scheduler.take_snapshot(now, num_dropped))
        self.snapshot_clock.on_sent(now)
