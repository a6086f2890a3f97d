"""What one step costs the scheduler: one JSON line a case, microseconds, the median over the steps.

Each step decodes 256 running requests, one of which ends, and admits one; metrics and explanations are on, two steps
are in flight. `step_us` is all that the process does for it: plan, encode for the workers, process the result, encode
for the detokenizer. `arrival_us` is what the new request cost when it arrived. One process, one core.

    python -m tests.bench.scheduler [--steps N] [--policies fcfs,lpm] [--waiting 100,10000] [--profile]
"""

import argparse
import cProfile
import json
import random
import statistics
import time
from array import array
from collections import defaultdict, deque

import msgspec

from millstream.common.messages import BatchResult, ScheduleBatch, TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig

NUM_RUNNING, OUTPUT_LEN, PROMPT_LEN, SHARED_LEN, NUM_GROUPS = 256, 256, 192, 64, 50
VOCAB_SIZE = 50_000
CONFIG = SchedulerConfig(
    num_pages=16_384,
    page_size=16,
    vocab_size=VOCAB_SIZE,
    context_len=8192,
    max_running_requests=NUM_RUNNING,
    chunked_prefill_size=2048,
    max_queued_requests=100_000,
    max_queued_tokens=1_000_000_000,
    schedule_ageing_steps=1_000_000,
    request_waiting_timeout=600.0,
    request_timeout=3600.0,
)


class Load:
    """A scheduler, and a worker that answers with random tokens."""

    def __init__(self, config: SchedulerConfig, num_waiting: int) -> None:
        self.random = random.Random(0)
        self.scheduler = Scheduler(config)
        self.results: deque[BatchResult] = deque()
        self.generations: dict[int, int] = {}
        self.prompt_lens: dict[int, int] = {}
        self.num_asked = 0
        self.num_rows: list[int] = []
        self.now = 0.0
        self.times: dict[str, list[float]] = defaultdict(list)
        shared = [self._random_ids(SHARED_LEN) for _ in range(NUM_GROUPS)]
        self.shared = [ids.tobytes() for ids in shared]
        for index in range(NUM_RUNNING):
            self.ask(max_new_tokens=1 + index)
            self.step()
        while len(self.scheduler.state.waiting_queue) < num_waiting:
            self.ask(OUTPUT_LEN)
        for _ in range(2 * OUTPUT_LEN):
            self.ask(OUTPUT_LEN)
            self.step()

    def ask(self, max_new_tokens: int) -> None:
        """A request arrives: one of a few shared beginnings, and an end of its own."""
        self.num_asked += 1
        message = TokenizedGenerateReqInput(
            rid=f"{self.num_asked:024x}",
            frontend="tokenizer_manager",
            arrival=self.now,
            input_ids=self.random.choice(self.shared) + self._random_ids(PROMPT_LEN - SHARED_LEN).tobytes(),
            sampling_params=SamplingParams(max_new_tokens=max_new_tokens, seed=1),
            eos_token_ids=(VOCAB_SIZE - 1,),
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
            token_ids=self._random_ids(sum(counts)).tobytes(),
            row_lens=bytes(4 * size),
            flags=bytes(4 * size),
            errors={},
            step_seconds=0.01,
        )

    def _random_ids(self, count: int) -> "array[int]":
        return array("i", [self.random.randrange(VOCAB_SIZE - 1) for _ in range(count)])


def measure(policy: str, num_waiting: int, num_steps: int) -> dict[str, object]:
    """One case."""
    load = Load(msgspec.structs.replace(CONFIG, schedule_policy=policy), num_waiting)
    load.times.clear()
    load.num_rows.clear()
    started = load.scheduler.state.stats.num_started_reqs
    for _ in range(num_steps):
        load.ask(OUTPUT_LEN)
        load.step()
    state = load.scheduler.state
    started = state.stats.num_started_reqs - started
    times = {name: round(1e6 * statistics.median(values), 1) for name, values in load.times.items()}
    times["step_p99_us"] = round(1e6 * sorted(load.times["step_us"])[int(0.99 * num_steps)], 1)
    shape = {"rows": statistics.median(load.num_rows), "admitted_per_step": round(started / num_steps, 2)}
    return {"policy": policy, "waiting": len(state.waiting_queue), **shape, **times}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policies", default="fcfs,lpm")
    parser.add_argument("--waiting", default="100,10000")
    parser.add_argument("--profile", action="store_true", help="print where the time of each case goes")
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


if __name__ == "__main__":
    main()
