"""Makes the stored traces: small storms on a recorded scheduler, one for each thing that it can do.

PYTHONPATH=.pkg:. python tests/scheduler/make_traces.py      # anew, after a change that means to decide otherwise
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from millstream.common.messages import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    unpack_int32,
)
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from tests.scheduler.harness import VOCAB_SIZE, Harness

TRACES = Path(__file__).parent / "traces"
EOS = (3, 4)


class RecordedHarness(Harness):
    """A Harness whose scheduler is recorded; time goes on a millisecond with each step."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(**options)
        config = self.scheduler.config
        self.recorder = ScheduleRecorder(path, config)
        self.scheduler = RecordedScheduler(config, self.recorder)
        self.state = self.scheduler.state

    def step(self) -> None:
        """As Harness, with the clock."""
        self.now = round(self.now + 0.001, 3)
        super().step()

    def pause(self, mode: str) -> None:
        """Ask for a pause, and let the pipeline drain."""
        self.scheduler.handle(PauseGenerationReqInput("pause", "http", mode), self.now)
        for _ in range(3):
            self.step()

    def go_on(self) -> None:
        """Continue."""
        self.scheduler.handle(ContinueGenerationReqInput("go-on", "http"), self.now)
        self._collect()

    def flush(self) -> None:
        """Ask for an empty cache."""
        self.scheduler.handle(FlushCacheReqInput("flush", "http"), self.now)
        self._collect()

    def finish(self) -> None:
        """Run until all have ended, then do what an idle server does."""
        self.run()
        while self.plan():  # an idle loop plans too
            pass
        self.scheduler.check_when_idle()
        self.scheduler.take_snapshot(self.now)
        self.scheduler.close()


class TimedHarness(RecordedHarness):
    """Its steps take the longer the more prompt tokens they have, and the later these are."""

    def plan(self) -> bool:
        """As Harness, with another time in the result."""
        is_planned = super().plan()
        if is_planned:
            seconds = 0.010
            for start, end in zip(
                *map(unpack_int32, (self.batches[-1].extend_starts, self.batches[-1].extend_ends)), strict=True
            ):
                seconds += 0.001 * (end - start) + 1e-5 * (end * end - start * start) / 2
            self.results[-1] = msgspec.structs.replace(self.results[-1], step_seconds=round(seconds, 6))
        return is_planned


def storm(
    harness: RecordedHarness,
    seed: int,
    *,
    num_reqs: int = 24,
    num_families: int = 3,
    shared_len: int = 20,
    tail_len: int = 12,
    max_new_tokens: int = 24,
    priorities: tuple[int | None, ...] = (None,),
    is_rude: bool = False,
) -> None:
    """Requests of a few families (which share a prefix) come in bursts; where `is_rude`, some are ended from outside."""
    rng = random.Random(seed)
    num_asked = 0
    while num_asked < num_reqs:
        for _ in range(rng.choice([1, 1, 4])):
            family = rng.randrange(num_families)
            prompt = [(family * 11 + i * i) % VOCAB_SIZE for i in range(rng.randint(1, shared_len))]
            prompt += [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(0, tail_len))]
            harness.ask(
                f"r{num_asked}",
                prompt,
                rng.randint(1, max_new_tokens),
                eos=rng.choice([(), EOS]),
                ignore_eos=rng.random() < 0.2,
                priority=rng.choice(priorities),
                routing_key=f"family{family}",
                arrival=harness.now,
            )
            num_asked += 1
        for _ in range(rng.randint(1, 8)):
            harness.step()
        if is_rude:
            end_some(harness, rng)
        harness.scheduler.take_snapshot(harness.now)


def end_some(harness: RecordedHarness, rng: random.Random) -> None:
    """Abort one request and end another by its text, if they are there."""
    alive = [
        rid for rid in harness.state.requests if not harness.clients[rid].ends and not harness.clients[rid].text_ends
    ]
    if alive and rng.random() < 0.3:
        harness.abort(rng.choice(alive), "nobody")
    alive = [rid for rid in alive if harness.clients[rid].output_ids and not harness.clients[rid].ends]
    if alive and rng.random() < 0.5:
        rid = rng.choice(alive)
        harness.end_text(rid, rng.randint(1, len(harness.clients[rid].output_ids)))


def chunked_prefill(path: Path) -> None:
    """Long prompts in chunks, beside decodes."""
    harness = RecordedHarness(path, chunked_prefill_size=16, num_pages=96)
    storm(harness, 1, num_reqs=14, shared_len=50, tail_len=40, max_new_tokens=30)
    harness.finish()


def no_chunks(path: Path) -> None:
    """Whole prompts, no overlap."""
    harness = RecordedHarness(path, chunked_prefill_size=-1, disable_overlap_schedule=True, page_size=1, num_pages=200)
    storm(harness, 2, num_reqs=16)
    harness.finish()


def retraction(path: Path) -> None:
    """More outputs than pages."""
    harness = RecordedHarness(path, num_pages=24, schedule_conservativeness=0.0)
    for wave in range(2):
        for index in range(6):
            harness.ask(f"wave{wave}-{index}", [wave * 10 + index] * (4 + index), 30)
        harness.run()
        harness.plan()  # idle: the estimate is bold again
    harness.finish()
    assert harness.state.stats.num_retractions > 3


def priority_preemption(path: Path) -> None:
    """Urgent requests take the place of others."""
    harness = RecordedHarness(path, num_pages=40, max_running_requests=4, enable_priority_scheduling=True)
    storm(harness, 4, num_reqs=24, max_new_tokens=30, priorities=(None, 0, 5, 50))
    harness.finish()


def lpm(path: Path) -> None:
    """Longest prefix first, of requests that share prefixes."""
    harness = RecordedHarness(path, schedule_policy="lpm", max_running_requests=4, schedule_ageing_steps=40)
    storm(harness, 5, num_reqs=30, num_families=4, shared_len=40, tail_len=6, max_new_tokens=10)
    harness.finish()


def dfs_weight(path: Path) -> None:
    """Heaviest subtree first."""
    harness = RecordedHarness(path, schedule_policy="dfs-weight", max_running_requests=4, radix_eviction_policy="lfu")
    storm(harness, 6, num_reqs=30, num_families=4, shared_len=40, tail_len=6, max_new_tokens=10)
    harness.finish()


def random_order(path: Path) -> None:
    """A seeded random order."""
    harness = RecordedHarness(path, schedule_policy="random", max_running_requests=3, random_seed=7)
    storm(harness, 7, max_new_tokens=10)
    harness.finish()


def longest_output_first(path: Path) -> None:
    """lof under pressure, with another eviction policy."""
    harness = RecordedHarness(path, schedule_policy="lof", num_pages=24, radix_eviction_policy="fifo")
    storm(harness, 8)
    harness.finish()


def routing_key(path: Path) -> None:
    """Requests of the key that runs most."""
    harness = RecordedHarness(path, schedule_policy="routing-key", max_running_requests=3)
    storm(harness, 9, max_new_tokens=10)
    harness.finish()


def backfilling(path: Path) -> None:
    """A large request waits for pages; small ones pass it."""
    harness = RecordedHarness(path, num_pages=40)
    for index in range(3):
        harness.ask(f"long{index}", [index + 5] * 16, 40, ignore_eos=True)
    harness.step()
    harness.ask("large", list(range(5, 45)) * 2, 60, ignore_eos=True)
    for index in range(6):
        harness.ask(f"small{index}", [index + 20] * 5, 2)
        harness.step()
    harness.finish()


def aborts_and_text_ends(path: Path) -> None:
    """Ends from outside meet ends by token; rows fail."""
    harness = RecordedHarness(path, num_pages=40, failing_token_id=47)
    storm(harness, 10, num_reqs=40, is_rude=True)
    harness.finish()


def pause_and_continue(path: Path) -> None:
    """Every mode of pausing, and flushes between."""
    harness = RecordedHarness(path)
    for number, mode in enumerate(("in_place", "retract", "abort")):
        for index in range(4):
            harness.ask(f"{mode}{index}", [number * 10 + index] * (6 + index), 12)
        for _ in range(4):
            harness.step()
        harness.pause(mode)
        harness.flush()
        harness.go_on()
        harness.flush()
        harness.run()
        harness.flush()
    harness.finish()


def several_tokens_a_step(path: Path) -> None:
    """Results of up to three tokens a row."""
    harness = RecordedHarness(path, decode_width=3, num_pages=40)
    storm(harness, 11, max_new_tokens=40, is_rude=True)
    harness.finish()


def limits(path: Path) -> None:
    """A short queue, and limits of time."""
    harness = RecordedHarness(
        path, max_running_requests=2, max_queued_requests=3, request_waiting_timeout=3.01, request_timeout=6.0
    )
    storm(harness, 12, num_reqs=30, max_new_tokens=30)
    harness.finish()


def automatic_chunks(path: Path) -> None:
    """The chunk size follows the step times."""
    harness = TimedHarness(path, chunked_prefill_size=0, num_pages=160)
    storm(harness, 13, num_reqs=14, shared_len=50, tail_len=90)
    harness.finish()


SCENARIOS: tuple[Callable[[Path], None], ...] = (
    chunked_prefill,
    no_chunks,
    retraction,
    priority_preemption,
    lpm,
    dfs_weight,
    random_order,
    longest_output_first,
    routing_key,
    backfilling,
    aborts_and_text_ends,
    pause_and_continue,
    several_tokens_a_step,
    limits,
    automatic_chunks,
)


def main(folder: Path = TRACES) -> int:
    """Write every trace anew."""
    folder.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        path = folder / f"{scenario.__name__}.jsonl"
        path.unlink(missing_ok=True)
        scenario(path)
        path.chmod(0o644)
        print(f"{path.name}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
