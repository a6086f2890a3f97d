"""What one step costs the scheduler: one JSON line a case, microseconds, the median over the steps.

Each step computes 256 running requests: one of them ends, and one is admitted; metrics and explanations are on, two
steps are in flight. `step_us` is all that the process does for it: plan, encode for the workers, process the result,
encode for the detokenizer. `arrival_us` is what the new request cost when it arrived. One process, one core.

Of that, SGLang's scheduler classes cover the admission (order the queue, match the prefix, the budgets, take pages) and
the caching (pages of prompts and outputs into the tree; for the request that ends, the rest freed and the prefix
unlocked). So `admission_us` and `cache_us` are measured of ours too, in steps of their own where these timers cannot
disturb the others, and then of SGLang's on the same requests. Ours alone pays for a match when a request arrives.

    tests/bench/peers/setup_sglang.sh
    python -m tests.bench.scheduler [--steps N] [--policies fcfs,lpm] [--waiting 100,10000] [--profile]
                                    [--sglang-python PATH] [--sglang-steps N]
"""

import argparse
import cProfile
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from millstream.common.batch_messages import BatchResult, ScheduleBatch
from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler import scheduler as scheduler_module
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from tests.bench.scheduler_load import (
    CHUNKED_PREFILL_SIZE,
    EOS_TOKEN_ID,
    MAX_PREFILL_TOKENS,
    NUM_PAGES,
    NUM_RUNNING,
    PAGE_SIZE,
    VOCAB_SIZE,
    Load,
    Request,
    median_us,
    p99_us,
    random_ids,
)

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "millstream-peers"))
CONFIG = SchedulerConfig(
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    vocab_size=VOCAB_SIZE,
    context_len=8192,
    max_running_requests=NUM_RUNNING + 1,  # who has ended holds its row for one step more: its last one is in flight
    chunked_prefill_size=CHUNKED_PREFILL_SIZE,
    max_prefill_tokens=MAX_PREFILL_TOKENS,
    max_queued_requests=100_000,
    max_queued_tokens=1_000_000_000,
    schedule_ageing_steps=1_000_000,
    request_waiting_timeout=600.0,
    request_timeout=3600.0,
)
Times = dict[str, list[float]]
P = ParamSpec("P")
T = TypeVar("T")


class OurServer:
    """Our scheduler, and a worker that answers with random tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.random = random.Random(1)
        self.scheduler = Scheduler(config)
        self.results: deque[BatchResult] = deque()
        self.generations: dict[int, int] = {}
        self.prompt_lens: dict[int, int] = {}
        self.num_rows: list[int] = []
        self.now = 0.0
        self.times: Times = defaultdict(list)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.state.waiting_queue)

    def ask(self, request: Request) -> None:
        message = TokenizedGenerateReqInput(
            rid=request.rid,
            frontend="tokenizer_manager",
            arrival=self.now,
            input_ids=request.token_ids.tobytes(),
            sampling_params=SamplingParams(max_new_tokens=request.max_new_tokens, seed=request.seed),
            eos_token_ids=(EOS_TOKEN_ID,),
            stream=True,
        )
        start = time.perf_counter()
        self.scheduler.handle(message, self.now)
        self.times["arrival_us"].append(time.perf_counter() - start)

    def step(self) -> None:
        """Plan one step, then take the result of the one before it."""
        self.now += 0.01
        scheduler, start = self.scheduler, time.perf_counter()
        batch = scheduler.get_next_batch_to_run(self.now)
        planned = time.perf_counter()
        msgspec.msgpack.encode(batch)
        encoded = time.perf_counter()
        if batch is not None:
            self.results.append(self._answer(batch))
        answered = time.perf_counter()
        if len(self.results) == CONFIG.max_steps_in_flight:
            scheduler.process_batch_result(self.results.popleft(), self.now)
        processed = time.perf_counter()
        msgspec.msgpack.encode(scheduler.take_output())
        sent = time.perf_counter()
        parts = {
            "plan_us": planned - start,
            "encode_us": encoded - planned,
            "process_us": processed - answered,
            "output_us": sent - processed,
        }
        for name, seconds in {"step_us": sum(parts.values()), **parts}.items():
            self.times[name].append(seconds)

    def _answer(self, batch: ScheduleBatch) -> BatchResult:
        """One token for each row that samples: all but those whose prompt is computed in part."""
        for new_req in batch.new_reqs:
            self.generations[new_req.row] = new_req.generation
            self.prompt_lens[new_req.row] = len(new_req.input_ids) // 4
        rows, ends = array("i"), array("i")
        rows.frombytes(batch.extend_rows + batch.decode_rows)
        ends.frombytes(batch.extend_ends)
        size = len(rows)
        self.num_rows.append(size)
        counts = [int(end == self.prompt_lens[row]) for row, end in zip(rows, ends, strict=False)]
        counts += [1] * (size - len(counts))
        return BatchResult(
            step=batch.step,
            rows=rows.tobytes(),
            generations=pack_int32([self.generations[row] for row in rows]),
            num_tokens=pack_int32(counts),
            token_ids=random_ids(self.random, sum(counts)).tobytes(),
            row_lens=bytes(4 * size),
            flags=bytes(4 * size),
            errors={},
            step_seconds=0.01,
        )


def measure(policy: str, num_waiting: int, num_steps: int) -> dict[str, object]:
    """One case."""
    server = OurServer(msgspec.structs.replace(CONFIG, schedule_policy=policy))
    load, stats = Load(server, num_waiting), server.scheduler.state.stats
    server.times.clear()
    server.num_rows.clear()
    started = stats.num_started_reqs
    load.run(num_steps)
    started = stats.num_started_reqs - started
    times = {name: median_us(values) for name, values in server.times.items()}
    times["step_p99_us"] = p99_us(server.times["step_us"])
    times["arrival_p99_us"] = p99_us(server.times["arrival_us"])
    shape = {"rows": statistics.median(server.num_rows), "admitted_per_step": round(started / num_steps, 2)}
    case = {"server": "millstream", "policy": policy, "waiting": num_waiting}
    return case | shape | times | measure_parts(load, server, num_steps)


def measure_parts(load: Load, server: OurServer, num_steps: int) -> dict[str, float]:
    """The parts that SGLang's classes cover, in more steps of the same load."""
    caches: list[float] = []
    with timed_parts(server.scheduler) as (admissions, cache_calls):
        for _ in range(num_steps):
            cache_calls.clear()
            load.run(1)
            caches.append(sum(cache_calls))
    parts = {"admission_us": median_us(admissions), "cache_us": median_us(caches)}
    return parts | {"admission_p99_us": p99_us(admissions)}


@contextmanager
def timed_parts(scheduler: Scheduler) -> Iterator[tuple[list[float], list[float]]]:
    """Seconds of each admission and of each call that caches pages, while the scheduler goes through its steps."""
    pool, get_new_batch_prefill = scheduler.state.pool, scheduler_module.get_new_batch_prefill
    admissions: list[float] = []
    cache_calls: list[float] = []
    scheduler_module.get_new_batch_prefill = _timed(get_new_batch_prefill, admissions)
    pool.cache_unfinished_req = _timed(pool.cache_unfinished_req, cache_calls)
    pool.cache_finished_req = _timed(pool.cache_finished_req, cache_calls)
    try:
        yield admissions, cache_calls
    finally:
        scheduler_module.get_new_batch_prefill = get_new_batch_prefill
        del pool.cache_unfinished_req, pool.cache_finished_req


def _timed(function: Callable[P, T], seconds: list[float]) -> Callable[P, T]:
    """What it returns, and how long it took."""

    @wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> T:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    return timed


def measure_sglang(python: Path, policies: str, waiting: str, num_steps: int) -> None:
    """The same cases in SGLang's environment; it prints its lines itself."""
    if not python.exists():
        print(f"SGLang is not measured: no {python} (tests/bench/peers/setup_sglang.sh)", file=sys.stderr)
        return
    options = ["--policies", policies, "--waiting", waiting, "--steps", str(num_steps)]
    command = [python, "-W", "ignore", "-m", "tests.bench.peers.sglang_scheduler", *options]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    """Run the cases: ours, then SGLang's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policies", default="fcfs,lpm")
    parser.add_argument("--waiting", default="100,10000")
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
    parser.add_argument("--sglang-python", type=Path, default=PEERS / "sglang" / "bin" / "python")
    parser.add_argument("--sglang-steps", type=int, default=300)
    options = parser.parse_args()
    for policy in options.policies.split(","):
        for num_waiting in map(int, options.waiting.split(",")):
            profile = cProfile.Profile(builtins=False)
            if options.profile:
                profile.enable()
            print(json.dumps(measure(policy, num_waiting, options.steps)), flush=True)
            profile.disable()
            if options.profile:
                profile.print_stats("tottime")
    if not options.profile:
        measure_sglang(options.sglang_python, options.policies, options.waiting, options.sglang_steps)


if __name__ == "__main__":
    main()
