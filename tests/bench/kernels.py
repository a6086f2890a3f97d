"""Every version of every operator beside its torch reference and the floor, in SmolLM2's shapes.

    python -m tests.bench.kernels [--only linear] [--rounds 5] [--threads 2] [--dtype bfloat16]

All versions that take a call, and the reference, run in turn within each round, so that the machine's noise meets all
of them; what can be recorded runs as a recorded list of calls, as in the server. One JSON line a case, then a Markdown table: medians in microseconds, how much faster than the reference the
version is that would be chosen, and the floor's share of its time (tests/bench/floor.py; what lies in the caches, as
activations do, can be faster than the memory rate allows, and float32 is held against the bf16 rate). Exit code 1 where
an operator of the catalogue has no case.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import millstream
from millstream.common.config import cache_dir
from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.kernels import backend
from millstream.kernels.catalogue import REFERENCE, Operator, known_operators
from millstream.kernels.graph import Arena, NotRecordable, record
from millstream.kernels.native import run_nodes
from tests.bench.floor import LINEAR, Rates, Work
from tests.bench.kernel_cases import CASES, Call, Case
from tests.bench.machine import describe_load, measure_rates

SECONDS_EACH = 0.02
MIN_RECORDED = 8  # calls in a list
ARENA_BYTES = 2**28
Function = Callable[..., object]


def catalogue() -> list[Operator[..., object]]:
    """Every operator of kernels/."""
    folder = Path(next(iter(millstream.__path__))) / "kernels"
    for path in sorted(folder.glob("*.py")):
        importlib.import_module(f"millstream.kernels.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("kernel_cases_*.py")):
        importlib.import_module(f"tests.bench.{path.stem}")
    return [each for each in known_operators() if each.reference.__module__.startswith("millstream.kernels.")]


def without_case(operators: Sequence[Operator[..., object]]) -> list[str]:
    """Operators that nobody times, and cases of operators that are no more."""
    return sorted({each.name for each in operators} ^ CASES.keys())


def measure(operator: Operator[..., object], case: Case, num_rounds: int, rates: Rates) -> dict[str, Any]:
    """Microseconds of each version, the reference included."""
    runs = {name: make_run(function, calls) for name, function, calls in runnable(operator, case)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            times[name].append(seconds_a_call(run))
    floor_us = 1e6 * Work(case.name, LINEAR, case.flops, case.num_bytes, case.is_int8).seconds(rates)
    medians = {name: round(1e6 * statistics.median(each), 1) for name, each in times.items()}
    chosen = next(iter(medians))
    return {
        "operator": operator.name,
        "case": case.name,
        "us": medians,
        "best_us": {name: round(1e6 * min(each), 1) for name, each in times.items()},
        "chosen": chosen,
        "speed_up": round(medians[REFERENCE] / medians[chosen], 1),
        "floor_us": round(floor_us, 2),
        "floor_share": round(floor_us / medians[chosen], 2),
    }


def runnable(operator: Operator[..., object], case: Case) -> Iterator[tuple[str, Function, Sequence[Call]]]:
    """Versions that take the case, the one that would run first, and the reference at the end."""
    for version in operator.versions:
        calls = case.calls_of.get(version.name, case.calls)
        if all(version.takes(*call.args, **call.kwargs) for call in calls):
            yield version.name, version.function, calls
    yield REFERENCE, operator.reference, case.calls


class Run(NamedTuple):
    """Runs `num_calls` calls."""

    num_calls: int
    function: Callable[[], object]


def make_run(function: Function, calls: Sequence[Call]) -> Run:
    """As a recorded list, as a server runs a step, where the version can be recorded; else call by call."""
    repeated = [*calls] * -(-MIN_RECORDED // len(calls))
    with contextlib.suppress(NotRecordable):
        with record(Arena(ARENA_BYTES)) as graph:
            for call in repeated:
                function(*call.args, **call.kwargs)
        if len(graph.nodes()):
            return Run(len(repeated), lambda: run_nodes(graph.nodes()))
    turns = itertools.cycle(calls)

    def call_next() -> None:
        call = next(turns)
        function(*call.args, **call.kwargs)

    return Run(1, call_next)


def seconds_a_call(run: Run) -> float:
    """Over as many calls as fit into SECONDS_EACH, after one turn that is not counted."""
    run.function()
    start = time.perf_counter()
    for count in itertools.count(1):
        run.function()
        seconds = time.perf_counter() - start
        if seconds > SECONDS_EACH:
            return seconds / (count * run.num_calls)
    raise AssertionError("never")


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """One row a case."""
    names = sorted({name for each in results for name in each["us"]}, key=lambda name: (name == REFERENCE, name))
    print(f"\n| operator | case | {' | '.join(f'{name} us' for name in names)} | speed-up | floor us | floor's share |")
    print("|---" * (len(names) + 5) + "|")
    for each in results:
        cells = " | ".join(f"{each['us'][name]:.1f}" if name in each["us"] else "" for name in names)
        figures = f"{each['speed_up']:.1f}x | {each['floor_us']:.1f} | {each['floor_share']:.2f}"
        print(f"| {each['operator']} | {each['case']} | {cells} | {figures} |")


def main() -> int:
    """0 if every operator has a case."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="operators whose name begins so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    backend.configure("auto", cache_dir())
    operators = catalogue()
    rates = measure_rates(load_model_config(find_model("smollm2"), "auto"))
    print(
        json.dumps({"rates": vars(rates), "threads": args.threads, "dtype": args.dtype, **describe_load()}), flush=True
    )
    results = []
    with torch.inference_mode():
        for operator in operators:
            if operator.name.startswith(args.only) and operator.name in CASES:
                for case in CASES[operator.name](getattr(torch, args.dtype)):
                    results.append(measure(operator, case, args.rounds, rates))
                    print(json.dumps(results[-1]), flush=True)
    print_table(results)
    missing = without_case(operators)
    if missing:
        print(f"PROBLEM: no case, or no operator, for {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
