"""Where one decode step's time goes at batch 1, 8 and 32, against the floor of its operators.

    python -m tests.bench.step [--batch 1,8,32] [--steps 64] [--quick] [--serve-args "--quantization w8a8"]

Three measurements, with rates of the machine taken first (tests/bench/machine.py):

    the operators   the recorded step runs with a time stamp between any two of them: linear, attention, other
    the worker      the same worker, driven by a script in this process: sampling, and the rest (inputs, results)
    the server      a whole server under load, whose schedule is recorded: what a step takes there from result to
                    result, and within the worker. The difference of both is waiting for the scheduler and messages;
                    the messages alone are timed on a channel. What the step takes longer within the worker than in
                    this process is the doing of the other processes, which share the cores.

One JSON line a batch, then a Markdown table in milliseconds. The floor is the sum over the operators of the larger of
their bytes (as the weights that ran are stored) over the memory rate and their FLOPs over the matrix rate.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from millstream.common.model_config import load_model_config
from millstream.common.model_path import find_model
from millstream.common.model_struct import ModelConfig
from millstream.common.settings import read_settings
from tests.bench import floor
from tests.bench.floor import ATTENTION, FORMATS, LINEAR, OTHER, SAMPLING, Rates
from tests.bench.machine import describe_load, measure_rates
from tests.bench.step_operators import formats_of
from tests.bench.step_server import ServerStep, measure_server
from tests.bench.step_worker import WorkerStep, load, measure_step

COLUMNS = (LINEAR, ATTENTION, OTHER, SAMPLING, "rest of the worker", "slower in the server", "messages", "waiting")
PROMPT_LEN = 256


def explain(
    config: ModelConfig, rates: Rates, batch: int, step: WorkerStep, server: ServerStep | None
) -> dict[str, Any]:
    """The parts of a step, which add up to what it takes in the server (or alone, without one), and the floor."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    for each in step.operators:
        by_kind[each.kind] += each.seconds
        by_name[each.name] += each.seconds
    parts = {kind: by_kind[kind] for kind in (LINEAR, ATTENTION, OTHER)}
    parts |= {SAMPLING: step.sampling, "rest of the worker": step.whole - sum(by_kind.values()) - step.sampling}
    if server is not None:
        parts["slower in the server"] = server.inside - step.whole
        parts["messages"] = step.messages
        parts["waiting"] = server.wall - server.inside - step.messages
    layers, head = formats_of(step.operators)
    works = list(floor.decode_step(config, FORMATS[layers], FORMATS[head], batch, step.context_len))
    floors = {kind: floor.seconds_of([work for work in works if work.kind == kind], rates) for kind in parts}
    seconds = sum(floors.values())
    figures = {"alone": step.whole, "in_server": server and server.wall, "floor": seconds}
    return {
        "batch": batch,
        "context_len": step.context_len,
        "weights": f"{layers}, logits {head}",
        "parts_ms": _ms(parts),
        "floor_parts_ms": _ms({kind: value for kind, value in floors.items() if value}),
        "operators_ms": _ms(by_name),
        **{f"{name}_ms": value and round(1e3 * value, 3) for name, value in figures.items()},
        "floor_share_alone": round(seconds / step.whole, 3),
        "floor_share_in_server": server and round(seconds / server.wall, 3),
        "steps_in_server": server and server.num_steps,
    }


def print_table(results: list[dict[str, Any]]) -> None:
    """Two rows a batch: what the parts take, and what they must take."""
    head = ["batch", "weights", *COLUMNS, "step", "of the floor's rate", "tokens/s"]
    print(f"\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for each in results:
        step_ms = each["in_server_ms"] or each["alone_ms"]
        share = each["floor_share_in_server"] or each["floor_share_alone"]
        for name, parts, last in (
            (
                each["weights"],
                each["parts_ms"],
                [f"{step_ms:.2f}", f"{share:.2f}", f"{1e3 * each['batch'] / step_ms:.0f}"],
            ),
            (
                "floor",
                each["floor_parts_ms"],
                [f"{each['floor_ms']:.2f}", "", f"{1e3 * each['batch'] / each['floor_ms']:.0f}"],
            ),
        ):
            cells = [f"{parts[column]:.2f}" if column in parts else "" for column in COLUMNS]
            print(f"| {' | '.join([str(each['batch']), name, *cells, *last])} |")


def main() -> int:
    """Measure, print. The servers come first: what the worker does to this process's threads is not theirs."""
    args = parse()
    config = load_model_config(find_model("smollm2"), "auto")
    servers = {}
    for batch in () if args.no_server else args.batch:
        servers[batch] = measure_server(batch, PROMPT_LEN, 2 * args.steps + 4 * batch, args.serve_args)
        print(json.dumps({"batch": batch, "server": servers[batch]._asdict()}), flush=True)
    contexts = {each: servers[each].context_len if each in servers else PROMPT_LEN + args.steps for each in args.batch}
    num_tokens = max(args.batch) * (max(contexts.values()) + 2 * args.steps)
    room = ["--max-running-requests", str(max(args.batch)), "--max-total-tokens", str(num_tokens)]
    worker = load(read_settings(["smollm2", *args.serve_args, *room], {}).args)
    load_now = describe_load()
    rates = measure_rates(config)
    print(json.dumps({"rates": dataclasses.asdict(rates), **load_now}), flush=True)
    results = []
    for batch in args.batch:
        step = measure_step(worker, batch, contexts[batch], args.steps)
        results.append(explain(config, rates, batch, step, servers.get(batch)))
        print(json.dumps(results[-1]), flush=True)
    print_table(results)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=lambda text: tuple(map(int, text.split(","))), default=(1, 8, 32))
    parser.add_argument("--steps", type=int, default=64, help="of the worker; the server makes twice as many")
    parser.add_argument("--no-server", action="store_true", help="the worker alone")
    parser.add_argument("--quick", action="store_true", help="8 steps: a trial")
    parser.add_argument(
        "--serve-args",
        type=lambda text: tuple(shlex.split(text)),
        default=(),
        help="more of the server's flags, in one word",
    )
    args = parser.parse_args()
    args.steps = 8 if args.quick else args.steps
    return args


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
