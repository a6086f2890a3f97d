"""How well `millstream simulate` foretells this machine: one load measured, and simulated with costs fitted to others.

    python -m tests.bench.simulation [--rounds 3] [--num-prompts 48] [--max-concurrency 8]

Each round starts a server on the packaged model, drives it with other prompts (alone and at the concurrency), and fits
the costs to what --record-schedule wrote. A second server then gets the load that counts, and the same load (the lengths
that the server reported, the same closed loop, the same configuration) is simulated. Prints a JSON line for each round,
then one with the medians; exit code 1 where a median is off by more than --tolerance percent.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from millstream.scheduler.cost_fit import fit_cost_model, fit_errors
from millstream.scheduler.cost_model import CostModel, encode_cost_model, load_cost_model
from millstream.scheduler.recorded_steps import read_steps
from millstream.scheduler.recording import read_recording
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation import Simulation
from millstream.scheduler.simulation_metrics import Report
from millstream.scheduler.token_stream import Segment
from millstream.scheduler.workload import SimulatedRequest, Trace
from millstream.tokenizer_manager.bench_client import Load, Sample, run_load
from millstream.tokenizer_manager.bench_command import make_report
from tests.e2e.server_process import serving

BASE = "smollm2_cpu"
FIT_SEED = 1000
ALONE_INPUT_LENS = (16, 64, 128, 256, 400)  # of prompts of the fitted run that are sent one after another
NUM_ALONE = 2  # of each length
ALONE_OUTPUT_LEN = 16


def measure(recording: Path, loads: list[Load]) -> list[tuple[Load, list[Sample], float]]:
    """Drive a fresh server with one load after another; the samples of each, and its seconds."""
    with serving("smollm2", "--record-schedule", str(recording)) as server:
        loads = [msgspec.structs.replace(load, base_url=server.url) for load in loads]
        results = [(load, *asyncio.run(run_load(load))) for load in loads]
        server.stop()
    return results


def make_load(args: argparse.Namespace, seed: int) -> Load:
    """The load that counts, of one seed."""
    return Load(
        base_url="",
        model="smollm2",
        num_prompts=args.num_prompts,
        max_concurrency=args.max_concurrency,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        seed=seed,
    )


def fit(args: argparse.Namespace, folder: Path, number: int) -> CostModel:
    """Costs from a run of other prompts: a few alone, of lengths that tell rows from tokens, then as many as count."""
    recording = folder / f"fit-{number}.jsonl"
    load = make_load(args, FIT_SEED + number)
    alone = [
        msgspec.structs.replace(
            load,
            num_prompts=NUM_ALONE,
            max_concurrency=1,
            random_input_len=input_len,
            random_output_len=ALONE_OUTPUT_LEN,
        )
        for input_len in ALONE_INPUT_LENS
    ]
    measure(recording, [*alone, load])
    return fit_recording(recording, number)


def fit_recording(recording: Path, number: int) -> CostModel:
    """Costs from a recording; prints the fit's errors."""
    run = read_steps(recorded := read_recording(recording), recorded.header.config.max_running_requests)
    costs = fit_cost_model(load_cost_model(BASE), run, "Fitted by tests/bench/simulation.py.")
    for error in fit_errors(costs, run):
        print(json.dumps({"round": number, "fit": msgspec.to_builtins(error)}), flush=True)
    return costs


def simulate(costs: CostModel, config: SchedulerConfig, samples: list[Sample], concurrency: int) -> Report:
    """The same lengths from the same number of clients; the warm-up request of the client is left out."""
    requests = [
        SimulatedRequest(
            prompt=(Segment(2 * index, sample.prompt_tokens),),
            input_len=sample.prompt_tokens,
            output_len=sample.output_tokens,
            max_new_tokens=sample.output_tokens,
            ignore_eos=True,
            output_stream=2 * index + 1,
        )
        for index, sample in enumerate(samples)
    ]
    config = msgspec.structs.replace(config, vocab_size=costs.model.vocab_size + 1)
    measurements = Simulation(Scheduler(config), costs, 1, Trace(requests, concurrency)).run()
    input_lens = np.array([request.input_len for request in requests])
    return measurements.report(config.schedule_policy, input_lens, np.zeros(len(requests), np.int64), 1000.0, 50.0)


def compare(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One round: measured, simulated, and how far the second is from the first in percent."""
    costs = fit(args, folder, number)
    recording = folder / f"load-{number}.jsonl"
    [(load, samples, seconds)] = measure(recording, [make_load(args, number)])
    measured = make_report(load, samples, seconds)
    assert not measured["num_errors"], measured["first_error"]
    simulated = simulate(costs, read_recording(recording).header.config, samples, args.max_concurrency)
    pairs = {
        "ttft_ms_p50": (measured["ttft_ms"]["p50"], simulated.ttft_ms.p50),
        "tpot_ms_p50": (measured["tpot_ms"]["p50"], simulated.tpot_ms.p50),
        "output_tokens_per_s": (measured["output_tokens_per_s"], simulated.output_tokens_per_s),
    }
    result = {
        name: {"measured": real, "simulated": round(virtual, 3), "percent": round(100 * (virtual / real - 1), 2)}
        for name, (real, virtual) in pairs.items()
    }
    print(json.dumps({"round": number, **result}), flush=True)
    if args.save_costs:
        Path(args.save_costs).write_bytes(encode_cost_model(costs))
    return result


def main() -> int:
    """0 if the medians of all three figures are within the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--random-input-len", type=int, default=256)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--tolerance", type=float, default=15.0, help="percent")
    parser.add_argument("--save-costs", metavar="FILE", help="also write the last round's cost model")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the recordings there")
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(args.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rounds = [compare(args, folder, number) for number in range(1, args.rounds + 1)]
    medians = {name: statistics.median(each[name]["percent"] for each in rounds) for name in rounds[0]}
    is_good = all(abs(percent) <= args.tolerance for percent in medians.values())
    print(json.dumps({"median_percent": medians, "tolerance": args.tolerance, "is_good": is_good}), flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
