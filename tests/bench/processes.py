"""What the processes beside the workers cost: CPU time of each for an output token and for a step; one JSON line a case.

A worker that sleeps stands in the model's place (paced_server.py): so the others are measured alone, at a rate of steps
that is chosen. At a model's rate their share of the cores is `us_per_token` times its tokens a second. `wakeups_per_step`
says how often a thread of the process got a core. Prompts have 256 words.

    python -m tests.bench.processes [--concurrency 1,8,32] [--output-lens 128] [--step-ms 6]
"""

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import NamedTuple

from millstream.tokenizer_manager.commands.bench_client import Load, run_load
from tests.bench.paced_server import STEP_MS
from tests.e2e.server_process import ServerProcess, serving

PACED_SERVER = ("-m", "tests.bench.paced_server")
INPUT_LEN = 256
MIN_PROMPTS = 8
WORKER = "tp_worker.0"
NAMES = ("main", "scheduler", "detokenizer", WORKER)


class Spent(NamedTuple):
    """Of all threads of a process, since its start."""

    cpu_us: float
    wakeups: int


def read_spent(server: ServerProcess) -> dict[str, Spent]:
    """By process, from /proc/PID/task/*/schedstat."""
    pids = {name: server.process.pid if name == "main" else server.child(name).pid for name in NAMES}
    spent = {}
    for name, pid in pids.items():
        threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        spent[name] = Spent(sum(int(each[0]) for each in threads) / 1000, sum(int(each[2]) for each in threads))
    return spent


def measure(server: ServerProcess, concurrency: int, output_len: int, seed: int) -> dict[str, object]:
    """One load; its figures."""
    num_prompts = max(2 * concurrency, MIN_PROMPTS) if output_len < 1000 else concurrency
    load = Load(server.url, "smollm2", num_prompts, concurrency, INPUT_LEN, output_len, seed, num_warmups=0)
    before, steps_before = read_spent(server), server.metric("millstream_steps_total")
    samples, seconds = asyncio.run(run_load(load))
    after, num_steps = read_spent(server), server.metric("millstream_steps_total") - steps_before
    errors = [sample.error for sample in samples if sample.error]
    if errors:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    num_tokens = sum(sample.output_tokens for sample in samples)
    cpu_us = {name: after[name].cpu_us - before[name].cpu_us for name in NAMES}
    others_us = sum(cpu_us.values()) - cpu_us[WORKER]
    return {
        "concurrency": concurrency,
        "output_len": output_len,
        "output_tok_s": round(num_tokens / seconds, 1),
        "us_per_token": {name: round(us / num_tokens, 1) for name, us in cpu_us.items()},
        "us_per_step": {name: round(us / num_steps) for name, us in cpu_us.items()},
        "wakeups_per_step": {
            name: round((after[name].wakeups - before[name].wakeups) / num_steps, 1) for name in NAMES
        },
        "all_but_worker_us_per_token": round(others_us / num_tokens, 1),
        "all_but_worker_us_per_step": round(others_us / num_steps),
    }


def main() -> None:
    """Run the cases on one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--output-lens", default="128")
    parser.add_argument("--step-ms", type=float, default=6.0)
    options = parser.parse_args()
    os.environ[STEP_MS] = str(options.step_ms)
    with serving("smollm2", program=PACED_SERVER) as server:
        measure(server, concurrency=4, output_len=32, seed=0)
        for output_len in map(int, options.output_lens.split(",")):
            for concurrency in map(int, options.concurrency.split(",")):
                print(json.dumps(measure(server, concurrency, output_len, seed=output_len)), flush=True)


if __name__ == "__main__":
    main()
