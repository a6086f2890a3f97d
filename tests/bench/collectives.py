"""Our shared-memory all-reduce against gloo's, of bfloat16 values between processes: microseconds as rank 0 sees them.

    python -m tests.bench.collectives

prints one JSON line per measurement, then a Markdown table. "recorded" is an all-reduce inside a graph of 60, as many as
a decode step of 30 layers has, and its p99 that of the graphs' means. "ratio" is gloo's median over recorded's. Ranks
that wait give their core away, so other work on the machine shows: 2 ranks want 2 free cores, and 3 share them.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from millstream.kernels.graph import Arena, record
from millstream.kernels.native import run_nodes
from millstream.tp_worker.communicator import Communicator
from tests.tp_worker.ranks import communicators, run_ranks

VALUES = (576, 576 * 8, 576 * 32, 576 * 128, 300_000)
STEP = 60
RECORDED, CALLED, GLOO = "recorded", "called from Python", "gloo"
ROUNDS = {RECORDED: 100, CALLED: 2000, GLOO: 300}
Figures = dict[str, float]


def main() -> None:
    """Measure every number of ranks, size and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--values", type=int, nargs="+", default=list(VALUES))
    options = parser.parse_args()
    rows: dict[tuple[int, int], dict[str, Figures]] = {}
    for size in options.ranks:
        for num_values in options.values:
            rows[size, num_values] = {kind: measure(kind, size, num_values) for kind in ROUNDS}
            for kind, figures in rows[size, num_values].items():
                line = {"collective": "all_reduce", "kind": kind, "ranks": size, "values": num_values, **figures}
                print(json.dumps(line), flush=True)
    print(f"\n{table(rows)}")


def measure(kind: str, size: int, num_values: int) -> Figures:
    """Median and p99 of an all-reduce, the first tenth of the rounds left out."""
    make = communicators("gloo" if kind == GLOO else "shared memory", size)

    def run(rank: int) -> list[float]:
        communicator, x = make(rank), torch.zeros(num_values, dtype=torch.bfloat16)
        call, num_calls = (record_step(communicator, x), STEP) if kind == RECORDED else (call_one(communicator, x), 1)
        times = []
        for _ in range(ROUNDS[kind]):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) / num_calls)
        communicator.close()
        return times[ROUNDS[kind] // 10 :]

    times: list[float] = run_ranks(size, run)[0]
    p99 = statistics.quantiles(times, n=100)[98]
    return {"median_us": round(statistics.median(times) * 1e6, 2), "p99_us": round(p99 * 1e6, 2)}


def call_one(communicator: Communicator, x: torch.Tensor) -> Callable[[], object]:
    """One all-reduce."""
    return lambda: communicator.all_reduce(x)


def record_step(communicator: Communicator, x: torch.Tensor) -> Callable[[], object]:
    """All of a step's, in one call."""
    with record(Arena(0)) as graph:
        for _ in range(STEP):
            communicator.all_reduce(x)
    return lambda: run_nodes(graph.nodes())


def table(rows: dict[tuple[int, int], dict[str, Figures]]) -> str:
    """Medians, p99 in brackets, in microseconds."""
    lines = [
        f"Microseconds, median (p99); {len(os.sched_getaffinity(0))} cores.",
        "",
        f"| ranks | values | {' | '.join(ROUNDS)} | ratio |",
        "|---" * (len(ROUNDS) + 3) + "|",
    ]
    for (size, num_values), kinds in rows.items():
        cells = [f"{kinds[kind]['median_us']:,} ({kinds[kind]['p99_us']:,})" for kind in ROUNDS]
        ratio = kinds[GLOO]["median_us"] / kinds[RECORDED]["median_us"]
        lines.append(f"| {size} | {num_values:,} | {' | '.join(cells)} | {ratio:,.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
