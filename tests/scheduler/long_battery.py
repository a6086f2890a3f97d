"""Many seeded simulations over all cores: `make test-long [SEEDS=200000] [SECONDS=3600]`.

    python -m tests.scheduler.long_battery [--first SEED] [--seeds N] [--seconds S] [--processes P]

Prints every seed that fails as it is found; exit code 1 if there was one. The seeds below 2,000 are those of `make test`.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.scheduler.simulate_seed import Failure, run_seed

BLOCK = 50


def run_block(first: int) -> tuple[Counter[str], list[str]]:
    """Play the seeds of a block; the rare situations of those that went well, and what is told of the others."""
    logging.disable()
    seen: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + BLOCK):
        try:
            seen += run_seed(seed)
        except Failure as failure:
            failures.append(str(failure))
    return seen, failures


def run_battery(
    first: int, num_seeds: int, seconds: float, num_processes: int
) -> Iterator[tuple[Counter[str], list[str]]]:
    """The blocks that are done within the time, as they come."""
    deadline = time.monotonic() + seconds
    blocks = range(first, first + num_seeds, BLOCK)
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for outcome in pool.imap_unordered(run_block, blocks):
            yield outcome
            if time.monotonic() > deadline:
                return


def main() -> None:
    """Run, tell the failures, and a summary."""
    parser = argparse.ArgumentParser(description="Many seeded simulations of the scheduler.")
    parser.add_argument("--first", type=int, default=2000, help="the first seed")
    parser.add_argument("--seeds", type=int, default=200_000, help="how many")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="stop after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    start = time.monotonic()
    num_seeds = num_failures = 0
    seen: Counter[str] = Counter()
    for met, failures in run_battery(args.first, args.seeds, args.seconds, args.processes):
        num_seeds += BLOCK
        num_failures += len(failures)
        seen += met
        for failure in failures:
            print(failure, flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(seen.items())))
    print(f"{num_seeds} seeds in {time.monotonic() - start:.0f} s, {num_failures} failed")
    sys.exit(1 if num_failures else 0)


if __name__ == "__main__":
    main()
