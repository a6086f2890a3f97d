"""Our server, llama.cpp and vLLM in turn: the same prompts from the same client, and what the machine allows at best.

    tests/bench/peers/setup.sh
    python -m tests.bench.serving                      (three rounds of everything: about half an hour)
    python -m tests.bench.serving --quick --servers ours,llama --workloads random --concurrency 8

Workloads; prompts have exactly that many tokens, and other content for each round and workload:

    random   256 tokens in, 128 out, at each --concurrency; nothing may come out of a cache
    warm     the same at concurrency 8, every prompt for the second time
    shared   1,024 tokens that all prompts begin with and that are cached, 64 of their own, 64 out, concurrency 8
    long     eight streams, and a prompt of 4,096 tokens that arrives while they run: their inter-token latencies
             while it is computed, beside their usual ones

Each round measures the machine's rates, then starts one server after the other. Prints a JSON line for each of these and
for each workload, then Markdown tables: medians over the rounds, ratios to the best peer, and the floor (the least time
that the machine needs: tests/bench/floor.py). Exit code 1 where a request failed, a prompt had another length than it
should, or the cache gave tokens that had to be computed.
"""

import argparse
import dataclasses
import itertools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.common.tokenizer import load_tokenizer
from tests.bench import serving_report
from tests.bench.floor import Rates, median_rates
from tests.bench.serving_loads import MODEL, Workload, make_prompts, measure, workloads
from tests.bench.serving_prompts import PromptMaker
from tests.bench.serving_servers import NAMES, ROOT, environment, running

DEFAULT_SERVERS = ("ours", "ours-w8a8", "llama", "vllm")
DEFAULT_WORKLOADS = ("random", "warm", "shared", "long")
QUICK_SCALE = 0.25
Prompts = dict[Workload, list[str]]


def measure_machine(round_number: int) -> Rates:
    """The rates of tests/bench/machine.py, from a process of its own."""
    command = [sys.executable, "-m", "tests.bench.machine"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    print(json.dumps({"round": round_number, **measured}), flush=True)
    return Rates(**measured["rates"])


def measure_server(name: str, prompts: Prompts, flags: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """All workloads on one server, which starts again only where a workload needs other slots."""
    for slots, group in itertools.groupby(prompts, key=lambda workload: workload.slots if name == "llama" else None):
        these = list(group)
        with running(name, slots or these[0].slots, flags) as server:
            yield {"server": name, "workload": "start", "start_to_ready_s": round(server.start_seconds, 2)}
            for workload in these:
                yield measure(server, workload, prompts[workload])


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Rates]]:
    """Every round; prints each result as it comes."""
    chosen = workloads(args.workloads, args.concurrency, QUICK_SCALE if args.quick else 1.0)
    maker = PromptMaker(load_tokenizer(find_model(MODEL)), args.seed)
    results, rates = [], []
    for round_number in range(1, args.rounds + 1):
        rates.append(measure_machine(round_number))
        prompts = {workload: make_prompts(workload, maker) for workload in chosen}
        for name in args.servers:
            for result in measure_server(name, prompts, args.serve_args):
                results.append({"round": round_number, **result})
                print(json.dumps(results[-1]), flush=True)
    return results, rates


def main() -> int:
    """0 if every measurement is what it says."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    results, rates = run(args)
    config = load_model_config(find_model(MODEL), "auto")
    print(f"\nRates (medians): {json.dumps(dataclasses.asdict(median_rates(rates)))}")
    for table in serving_report.tables(results, config, median_rates(rates)):
        print(f"\n{table}")
    problems = serving_report.problems(results)
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--servers", type=_names(NAMES), default=DEFAULT_SERVERS, help=f"of {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "--workloads",
        type=_names(DEFAULT_WORKLOADS),
        default=DEFAULT_WORKLOADS,
        help=f"of {', '.join(DEFAULT_WORKLOADS)} (default: all)",
    )
    parser.add_argument(
        "--concurrency", type=_numbers, default=(1, 8, 32), help="of the random workload (default: 1,8,32)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="(default: 3; 1 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round and a quarter of the prompts: a trial")
    parser.add_argument(
        "--serve-args",
        type=lambda text: tuple(shlex.split(text)),
        default=(),
        help="more flags for our server, in one word",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if set(names) - set(known):
            raise argparse.ArgumentTypeError(f"known are {', '.join(known)}")
        return names

    return read


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
