"""A rank as a process of its own: what it says, in which order, and how it ends."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.common.batch_messages import BatchResult, GrammarReady, NewReq, PageColumns, ScheduleBatch, StepAck
from millstream.common.channel import Hub, Receiver, Sender
from millstream.common.config import ChildConfig
from millstream.common.links import FromRank, rank_to_scheduler, scheduler_to_rank
from millstream.common.messages import KVGroup, LoadProgress, WorkerReady, pack_int32, unpack_int32
from millstream.common.process import read_cause, start_child
from millstream.common.run_dir import LOCK_NAME, hold_run_dir
from tests.tp_worker.driver import GREEDY, tiny_args

INSTANCE_ID = 77
DEADLINE_SECONDS = 90


class Scheduler:
    """The scheduler's ends of one rank's links."""

    def __init__(self, run_dir: Path) -> None:
        self.hub = Hub(run_dir, INSTANCE_ID)
        self.from_rank: Receiver[FromRank] = self.hub.open_receiver(rank_to_scheduler(0), FromRank)
        self.to_rank: Sender = self.hub.open_sender(scheduler_to_rank(0))

    def receive(self, last: type) -> list[FromRank]:
        """Everything up to the first message of this kind."""
        messages: list[FromRank] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(isinstance(message, last) for message in messages):
            assert time.monotonic() < deadline, messages
            self.hub.wait(1000)
            messages += self.from_rank.drain()
        return messages


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    """Bound in a run directory of its own."""
    (tmp_path / LOCK_NAME).touch()
    lock = hold_run_dir(tmp_path)
    scheduler = Scheduler(tmp_path)
    yield scheduler
    scheduler.hub.close()
    os.close(lock)


def prefill(step: int, row: int) -> ScheduleBatch:
    """A prompt of five tokens on two pages."""
    req = NewReq(row, 1, "rid", pack_int32([5, 6, 7, 8, 9]), 5, GREEDY, ())
    pages = PageColumns(pack_int32([row]), pack_int32([2]), pack_int32([2 * row, 2 * row + 1]))
    columns = (pack_int32([row]), pack_int32([0]), pack_int32([5]))
    return ScheduleBatch(step, b"", [req], [pages], *columns, b"")


def decode(step: int, row: int) -> ScheduleBatch:
    """The next token of a row."""
    return ScheduleBatch(step, b"", [], [], b"", b"", b"", pack_int32([row]))


def announcement(step: int, grammars: dict[int, str]) -> ScheduleBatch:
    """A step that only tells of grammars."""
    return ScheduleBatch(step, b"", [], [], b"", b"", b"", b"", new_grammars=grammars)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_rank_loads_answers_in_order_rests_when_idle_and_ends_with_its_cause(
    scheduler: Scheduler, tiny_model: Path, tmp_path: Path
) -> None:
    args = tiny_args(tiny_model, max_total_tokens=256)
    config = ChildConfig("tp_worker.0", 0, str(tmp_path), INSTANCE_ID, args)
    child = start_child("millstream.tp_worker.process:run", config)
    try:
        *progress, ready = scheduler.receive(WorkerReady)
        assert isinstance(ready, WorkerReady)
        assert progress
        assert all(isinstance(message, LoadProgress) for message in progress)
        assert (ready.vocab_size, ready.context_len, ready.max_running_requests) == (300, 256, 40)
        assert ready.kv_groups == [KVGroup("full", 2, 2 * 2 * 4 * 3 * 8 * 4, 64)]

        for batch in (prefill(0, 3), decode(1, 3)):  # two steps in flight
            scheduler.to_rank.send(batch)
        answers = scheduler.receive(StepAck)
        while len(answers) < 4:
            answers += scheduler.receive(StepAck)
        assert [type(answer) for answer in answers] == [BatchResult, StepAck] * 2
        results = [answer for answer in answers if isinstance(answer, BatchResult)]
        assert [unpack_int32(result.row_lens) for result in results] == [[6], [7]]

        scheduler.to_rank.send(announcement(2, {5: "anything"}))
        assert [type(answer) for answer in scheduler.receive(GrammarReady)] == [StepAck, GrammarReady]

        used = cpu_seconds(child.pid)
        time.sleep(1.0)
        assert cpu_seconds(child.pid) - used <= 0.06

        scheduler.to_rank.send(ScheduleBatch(3, pack_int32([9]), [], [], b"", b"", b"", b""))
        assert child.wait(DEADLINE_SECONDS) == 1
        cause = read_cause(tmp_path, "tp_worker.0")
        assert cause is not None
        assert cause.startswith("BatchError: a row is freed that nobody has: [9]")
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
