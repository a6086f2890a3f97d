"""When the scheduler process looks after its own state: once, a second after the last request has ended."""

from collections.abc import Iterator

import pytest

from millstream.common.batch_messages import BatchResult
from millstream.common.channel import Hub
from millstream.common.config import ServerArgs
from millstream.common.messages import KVGroup, TokenizedGenerateReqInput, WorkerReady, pack_int32
from millstream.common.run_dir import create_run_dir, leave_run_dir
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.process import SchedulerProcess
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.start_up import open_links, scheduler_config

ONE_TOKEN = SamplingParams(max_new_tokens=1)
READY = WorkerReady(
    rank=0,
    kv_groups=[KVGroup("full", num_layers=1, page_bytes=64, num_pages=32)],
    vocab_size=100,
    context_len=100,
    max_running_requests=4,
    weight_bytes=1,
)


@pytest.fixture
def process() -> Iterator[SchedulerProcess]:
    """A scheduler process whose links nobody reads."""
    run_dir, lock = create_run_dir()
    hub = Hub(run_dir, 1)
    args = ServerArgs(model_path="fake")
    yield SchedulerProcess(hub, open_links(hub, tp_size=1), Scheduler(scheduler_config(args, [READY])), args)
    hub.close()
    leave_run_dir(run_dir, lock)


def serve_one(process: SchedulerProcess, now: float) -> None:
    """A request of one token comes, is computed, and ends."""
    scheduler = process.scheduler
    scheduler.handle(TokenizedGenerateReqInput(f"r{now}", "http", now, pack_int32([1, 2]), ONE_TOKEN), now)
    process.plan(now)
    (step,) = scheduler.state.in_flight
    columns = [pack_int32([number]) for number in (1, 5, 3, 0)]
    scheduler.process_batch_result(
        BatchResult(step.step, step.packed_rows, step.packed_generations, *columns, errors={}, step_seconds=0.01), now
    )
    assert scheduler.is_idle
    process.snapshot_clock.on_sent(now)


def lose_a_page(process: SchedulerProcess) -> None:
    process.scheduler.state.pool.allocator._free_page_ids.pop()


def test_a_fault_is_found_a_second_after_the_last_request_and_the_server_goes_on(process: SchedulerProcess) -> None:
    state = process.scheduler.state
    start = process.snapshot_clock._last + 10.0
    serve_one(process, start)
    lose_a_page(process)
    process.send_snapshot(start + 0.9)
    assert state.stats.num_broken_invariants == 0
    process.send_snapshot(start + 1.1)
    assert state.stats.num_broken_invariants == 1
    assert state.pool.allocator.num_free_pages == 32
    serve_one(process, start + 2.0)


def test_nothing_is_checked_again_until_something_ran(process: SchedulerProcess) -> None:
    state = process.scheduler.state
    start = process.snapshot_clock._last + 10.0
    serve_one(process, start)
    process.send_snapshot(start + 1.1)
    lose_a_page(process)
    process.send_snapshot(start + 5.0)
    assert state.stats.num_broken_invariants == 0
    serve_one(process, start + 6.0)
    process.send_snapshot(start + 8.0)
    assert state.stats.num_broken_invariants == 1
