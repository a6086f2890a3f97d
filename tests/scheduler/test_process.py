"""The scheduler as a process, with fake workers as processes; this test is the tokenizer manager and the detokenizer."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream.common.channel import Hub
from millstream.common.config import ChildConfig, ServerArgs
from millstream.common.links import (
    SCHEDULER,
    FromScheduler,
    detokenizer_to_scheduler,
    manager_to_scheduler,
    scheduler_to_detokenizer,
    scheduler_to_manager,
    worker_name,
)
from millstream.common.messages import (
    AbortReq,
    ControlReqOutput,
    FlushCacheReqInput,
    KVGroup,
    LoadProgress,
    LoadSnapshot,
    SchedulerReady,
    TokenizedGenerateReqInput,
    WorkerReady,
    pack_int32,
    unpack_int32,
)
from millstream.common.process import read_cause, start_child
from millstream.common.run_dir import create_run_dir, leave_run_dir
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import BatchTokenIDOutput
from millstream.scheduler.process import SchedulerProcess
from millstream.scheduler.recording.recording import read_recording
from millstream.scheduler.recording.replay import replay
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.start_up import open_links, scheduler_config
from tests.scheduler.fake_worker import VOCAB_SIZE, reference_outputs

DEADLINE = 20.0
INSTANCE_ID = 77


@dataclass
class Boot:
    """A scheduler and its workers, seen from the other processes."""

    run_dir: Path
    args: ServerArgs
    children: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    from_scheduler: list[Any] = field(default_factory=list)
    outputs: list[BatchTokenIDOutput] = field(default_factory=list)

    def start(self, worker_entry: str) -> None:
        self.hub = Hub(self.run_dir, INSTANCE_ID)
        self.replies = self.hub.open_receiver(scheduler_to_manager(), FromScheduler)
        self.tokens = self.hub.open_receiver(scheduler_to_detokenizer(), BatchTokenIDOutput)
        self.to_scheduler = self.hub.open_sender(manager_to_scheduler())
        self.text_ends = self.hub.open_sender(detokenizer_to_scheduler())
        entries = {SCHEDULER: ("millstream.scheduler.process:run", 0)}
        entries |= {worker_name(rank): (worker_entry, rank) for rank in range(self.args.tp_size)}
        for name, (entry, rank) in entries.items():
            config = ChildConfig(name, rank, str(self.run_dir), INSTANCE_ID, self.args)
            self.children[name] = start_child(entry, config)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Take messages until the condition holds."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.hub.wait(20)
            self.from_scheduler += self.replies.drain()
            self.outputs += self.tokens.drain()

    def seen(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.from_scheduler if isinstance(message, kind)]

    def ask(self, rid: str, prompt: list[int], max_new_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=max_new_tokens)
        self.to_scheduler.send(TokenizedGenerateReqInput(rid, "http", time.monotonic(), pack_int32(prompt), params))

    def ends(self) -> dict[str, str]:
        return {end.rid: type(end.finish_reason).__name__ for output in self.outputs for end in output.ends}

    def output_ids(self, rid: str) -> list[int]:
        outputs: list[int] = []
        for output in self.outputs:
            token_ids = unpack_int32(output.token_ids)
            for each, count in zip(output.rids, unpack_int32(output.num_tokens), strict=True):
                outputs += token_ids[:count] if each == rid else []
                del token_ids[:count]
        return outputs

    def stop(self) -> None:
        for child in self.children.values():
            assert child.stdin is not None
            child.stdin.close()
            child.wait(DEADLINE)
        self.hub.close()


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Boot]]:
    boots: list[tuple[Boot, int]] = []

    def start(worker_entry: str = "tests.scheduler.fake_worker:run", **flags: Any) -> Boot:
        run_dir, lock = create_run_dir()
        made = Boot(run_dir, ServerArgs(model_path="fake", page_size=4, **flags))
        boots.append((made, lock))
        made.start(worker_entry)
        return made

    root = str(Path(__file__).parent.parent.parent)
    monkeypatch.setenv("PYTHONPATH", f"{root}:{tmp_path}")
    yield start
    for made, lock in boots:
        made.stop()
        leave_run_dir(made.run_dir, lock)


def test_two_ranks_become_ready_and_serve_requests_to_their_end(boot: Callable[..., Boot]) -> None:
    server = boot(tp_size=2)
    server.wait_for(lambda: bool(server.seen(SchedulerReady)))
    assert {message.rank for message in server.seen(LoadProgress)} == {0, 1}
    ready = server.seen(SchedulerReady)[0]
    assert (ready.num_kv_pages, ready.page_size, ready.vocab_size, ready.weight_bytes) == (512, 4, VOCAB_SIZE, 2000)
    prompts = {f"r{i}": [i, 2, 3] * 5 for i in range(8)}
    for rid, prompt in prompts.items():
        server.ask(rid, prompt, 12)
    server.ask("aborted", [1, 2, 3], 1000)
    server.wait_for(lambda: bool(server.output_ids("aborted")))
    server.to_scheduler.send(AbortReq(["aborted"]))
    server.wait_for(lambda: len(server.ends()) == 9)
    for rid, prompt in prompts.items():
        assert server.output_ids(rid) == reference_outputs(prompt, VOCAB_SIZE, 12)
    assert server.ends()["aborted"] == "FINISH_ABORT"
    server.to_scheduler.send(FlushCacheReqInput("flush", "http"))
    server.wait_for(lambda: bool(server.seen(ControlReqOutput)))
    assert server.seen(ControlReqOutput)[0].success


def test_idle_it_uses_under_two_percent_of_a_core_and_keeps_its_heartbeat(boot: Callable[..., Boot]) -> None:
    server = boot()
    server.ask("r", [1, 2, 3], 5)
    server.wait_for(lambda: bool(server.ends()))
    server.wait_for(lambda: bool(server.seen(LoadSnapshot)) and server.seen(LoadSnapshot)[-1].num_running_reqs == 0)
    process = psutil.Process(server.children[SCHEDULER].pid)
    used, start, num_beats = process.cpu_times(), time.monotonic(), len(server.seen(LoadSnapshot))
    server.wait_for(lambda: time.monotonic() - start > 3.5)
    after = process.cpu_times()
    assert (after.user + after.system) - (used.user + used.system) < 0.02 * 3.5 * 3  # threefold slack
    assert 2 <= len(server.seen(LoadSnapshot)) - num_beats <= 5
    num_observed = sum(len(snapshot.step_seconds) for snapshot in server.seen(LoadSnapshot))
    assert num_observed == server.seen(LoadSnapshot)[-1].steps >= 5


def test_a_recorded_schedule_is_replayed_with_equal_decisions(boot: Callable[..., Boot], tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    server = boot(record_schedule=str(path), max_running_requests=4)
    for index in range(12):
        server.ask(f"r{index}", [index % 3, 2, 3] * 6, 20)
    server.wait_for(lambda: bool(server.output_ids("r2")))
    server.to_scheduler.send(AbortReq(["r2", "r11"]))
    server.wait_for(lambda: len(server.ends()) == 12)
    num_snapshots = len(server.seen(LoadSnapshot))
    server.wait_for(lambda: len(server.seen(LoadSnapshot)) > num_snapshots)
    report = replay(read_recording(path))
    assert report.difference is None
    assert report.num_events > 50


def test_while_a_link_is_full_no_step_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    run_dir, lock = create_run_dir()
    hub = Hub(run_dir, INSTANCE_ID)
    links = open_links(hub, tp_size=1)
    args = ServerArgs(model_path="fake")
    process = SchedulerProcess(hub, links, Scheduler(scheduler_config(args, [worker_ready(0)])), args)
    nobody_reads = links.to_detokenizer
    while not nobody_reads.is_full:
        nobody_reads.send(BatchTokenIDOutput([], [], b"", b"", b"", b"", []))
    process.scheduler.handle(TokenizedGenerateReqInput("r", "http", 0.0, pack_int32([1, 2]), SamplingParams()), 0.0)
    process.plan(now=0.0)
    assert process.scheduler.state.in_flight == []
    assert "no step is planned" in caplog.text
    hub.close()
    leave_run_dir(run_dir, lock)


SLOW_WORKER = """
from tests.scheduler.fake_worker import serve

def run(config):
    serve(config, step_seconds=60.0 if config.rank == 1 else 0.0)
"""


def test_a_rank_that_hangs_ends_the_server_with_its_name_as_the_cause(
    boot: Callable[..., Boot], tmp_path: Path
) -> None:
    (tmp_path / "slow_worker.py").write_text(SLOW_WORKER)
    server = boot("slow_worker:run", tp_size=2, watchdog_timeout=1.0)
    server.wait_for(lambda: bool(server.seen(SchedulerReady)))
    server.ask("r", [1, 2, 3], 5)
    server.wait_for(lambda: server.children[SCHEDULER].poll() is not None)
    assert server.children[SCHEDULER].returncode == 1
    cause = read_cause(server.run_dir, SCHEDULER)
    assert cause is not None
    assert "rank 1 has not acknowledged" in cause


def worker_ready(rank: int, **changes: Any) -> WorkerReady:
    facts = {"num_pages": 10, "vocab_size": 100, "context_len": 50, "groups": 1, **changes}
    groups = [KVGroup(f"g{i}", 1, 64, facts["num_pages"]) for i in range(facts["groups"])]
    return WorkerReady(rank, groups, facts["vocab_size"], facts["context_len"], 8, 1)


def test_the_pages_are_the_minimum_over_the_ranks() -> None:
    args = ServerArgs(model_path="m", tp_size=2)
    config = scheduler_config(args, [worker_ready(0), worker_ready(1, num_pages=7)])
    assert (config.num_pages, config.max_running_requests) == (7, 8)


@pytest.mark.parametrize("changes", [{"vocab_size": 101}, {"context_len": 51}, {"groups": 2}, {"num_pages": 0}])
def test_ranks_that_do_not_agree_or_have_no_room_end_the_start(changes: dict[str, int]) -> None:
    with pytest.raises(RuntimeError):
        scheduler_config(ServerArgs(model_path="m", tp_size=2), [worker_ready(0), worker_ready(1, **changes)])
