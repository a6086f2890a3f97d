"""Our shared-memory collectives against gloo: `python -m tests.bench.collectives`, one JSON line per measurement.

The all-reduce of `values` bfloat16 numbers between `ranks` processes; microseconds a call, as rank 0 sees it.
"""

import json
import statistics
import time

import torch

from tests.tp_worker.ranks import communicators, run_ranks

VALUES = (576, 576 * 8, 576 * 32, 576 * 128, 300_000)


def measure(kind: str, size: int, num_values: int, num_rounds: int) -> list[float]:
    """Seconds of each call on rank 0."""
    make = communicators(kind, size)

    def run(rank: int) -> list[float]:
        communicator, x = make(rank), torch.zeros(num_values, dtype=torch.bfloat16)
        times = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            communicator.all_reduce(x)
            times.append(time.perf_counter() - start)
        communicator.close()
        return times[num_rounds // 10 :]

    times: list[float] = run_ranks(size, run)[0]
    return times


def main() -> None:
    """Measure every size, kind and number of ranks."""
    for size in (2, 3):
        for num_values in VALUES:
            for kind, num_rounds in (("shared memory", 2000), ("gloo", 200)):
                times = measure(kind, size, num_values, num_rounds)
                line = {
                    "collective": "all_reduce",
                    "kind": kind,
                    "ranks": size,
                    "values": num_values,
                    "median_us": round(statistics.median(times) * 1e6, 1),
                    "p99_us": round(statistics.quantiles(times, n=100)[98] * 1e6, 1),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
