"""How well `millstream simulate` foretells this machine: one load measured, and simulated with costs fitted to others.

    python -m tests.bench.simulation [--rounds 3] [--num-prompts 48] [--max-concurrency 8]

A load is some users who each send one prompt after another, with lengths of their own (from half to one and a half times
the mean), so that they do not march in step. Each round starts a server on the packaged model, drives it with other
prompts (a few alone, then a load of the same kind), and fits the costs to what --record-schedule wrote. A second server
gets the load that counts, and the same load (the lengths that the server reported, the same users, the same
configuration) is simulated. Prints a JSON line for each round, then one with the medians; exit code 1 where a median is
off by more than --tolerance percent.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from millstream.scheduler.recording.recording import read_recording
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_fit import fit_cost_model, fit_errors
from millstream.scheduler.simulation.cost_model import CostModel, encode_cost_model, load_cost_model
from millstream.scheduler.simulation.metrics import Report
from millstream.scheduler.simulation.recorded_steps import read_steps
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.token_stream import Segment
from millstream.scheduler.simulation.workload import SimulatedRequest, Trace
from millstream.tokenizer_manager.commands.bench_client import Load, Sample, run_load
from millstream.tokenizer_manager.commands.bench_command import make_report
from tests.e2e.server_process import serving

BASE = "smollm2_cpu"
FIT_SEED = 1000
STOP_SECONDS = 30
DESCRIPTION = (
    "SmolLM2-135M in bfloat16 on {cores} core(s) of an AMD EPYC with AVX-512 BF16. The model's numbers follow from its "
    "shape; rates, overheads and surroundings are fitted by tests/bench/simulation.py to a recorded run, all but "
    "output_seconds, iteration_seconds and the tensor-parallel part, which are guesses. The ceilings are four times what "
    "the linear part reached."
)
ALONE_INPUT_LENS = (16, 64, 128, 256, 400)  # of prompts of the fitted run that are sent one after another
NUM_ALONE = 2  # of each length
ALONE_OUTPUT_LEN = 16
OUTPUT_STRIDE = 3  # from a user to whose share its outputs have


class Measured(NamedTuple):
    """What the clients saw: the samples of each user in order, and the seconds of all."""

    load: Load
    users: list[list[Sample]]
    seconds: float


def user_loads(args: argparse.Namespace, seed: int) -> list[Load]:
    """One load for each user, a prompt at a time; long prompts do not come with long outputs."""
    count = args.max_concurrency
    shares = [0.5 + (user + 0.5) / count for user in range(count)]
    return [
        Load(
            base_url="",
            model="smollm2",
            num_prompts=max(1, args.num_prompts // count),
            max_concurrency=1,
            random_input_len=round(args.random_input_len * share),
            random_output_len=round(args.random_output_len * shares[(user * OUTPUT_STRIDE + 1) % count]),
            seed=seed * 1000 + user,
            num_warmups=0,
        )
        for user, share in enumerate(shares)
    ]


async def run_users(loads: list[Load]) -> tuple[list[list[Sample]], float]:
    """All users at once; the samples of each, and the seconds of all."""
    start = time.perf_counter()
    results = await asyncio.gather(*(run_load(load) for load in loads))
    return [samples for samples, _ in results], time.perf_counter() - start


def measure(recording: Path, alone: list[Load], users: list[Load]) -> Measured:
    """Drive a fresh server with the loads that come alone, then with the users."""
    with serving("smollm2", "--record-schedule", str(recording)) as server:
        for load in alone:
            asyncio.run(run_load(msgspec.structs.replace(load, base_url=server.url)))
        loads = [msgspec.structs.replace(load, base_url=server.url) for load in users]
        samples, seconds = asyncio.run(run_users(loads))
        server.process.terminate()
        server.process.wait(STOP_SECONDS)
    return Measured(loads[0], samples, seconds)


def fit(args: argparse.Namespace, folder: Path, number: int) -> CostModel:
    """Costs from a run of other prompts; those alone have lengths that tell rows from tokens."""
    recording = folder / f"fit-{number}.jsonl"
    users = user_loads(args, FIT_SEED + number)
    alone = [
        msgspec.structs.replace(
            users[0], num_prompts=NUM_ALONE, random_input_len=input_len, random_output_len=ALONE_OUTPUT_LEN
        )
        for input_len in ALONE_INPUT_LENS
    ]
    measure(recording, alone, users)
    return fit_recording(recording, number)


def fit_recording(recording: Path, number: int) -> CostModel:
    """Costs from a recording; prints the fit's errors."""
    run = read_steps(recorded := read_recording(recording), recorded.header.config.max_running_requests)
    costs = fit_cost_model(load_cost_model(BASE), run, DESCRIPTION.format(cores=len(os.sched_getaffinity(0))))
    for error in fit_errors(costs, run):
        print(json.dumps({"round": number, "fit": msgspec.to_builtins(error)}), flush=True)
    return costs


def make_trace(users: list[list[Sample]]) -> Trace:
    """Each user's requests, one after another, with the lengths that the server reported."""
    requests: list[SimulatedRequest] = []
    for samples in users:
        for turn, sample in enumerate(samples):
            number = len(requests)
            request = SimulatedRequest(
                prompt=(Segment(2 * number, sample.prompt_tokens),),
                input_len=sample.prompt_tokens,
                output_len=sample.output_tokens,
                max_new_tokens=sample.output_tokens,
                ignore_eos=True,
                arrival=None if turn else 0.0,
                after=number - 1 if turn else None,
                output_stream=2 * number + 1,
            )
            requests.append(request)
    return Trace(requests)


def simulate(costs: CostModel, config: SchedulerConfig, trace: Trace) -> Report:
    """The trace under the configuration of the server that was measured."""
    config = msgspec.structs.replace(config, vocab_size=costs.model.vocab_size + 1)
    measurements = Simulation(Scheduler(config), costs, 1, trace).run()
    input_lens = np.array([request.input_len for request in trace.requests])
    return measurements.report(config.schedule_policy, input_lens, np.zeros_like(input_lens), 1000.0, 50.0)


def compare(args: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """One round: measured, simulated, and how far the second is from the first in percent."""
    costs = fit(args, folder, number)
    recording = folder / f"load-{number}.jsonl"
    users = user_loads(args, number)
    warm_up = msgspec.structs.replace(users[0], seed=FIT_SEED, num_prompts=1)
    measured = measure(recording, [warm_up], users)
    report = make_report(measured.load, [sample for samples in measured.users for sample in samples], measured.seconds)
    assert not report["num_errors"], report["first_error"]
    simulated = simulate(costs, read_recording(recording).header.config, make_trace(measured.users))
    pairs = {
        "ttft_ms_p50": (report["ttft_ms"]["p50"], simulated.ttft_ms.p50),
        "tpot_ms_p50": (report["tpot_ms"]["p50"], simulated.tpot_ms.p50),
        "output_tokens_per_s": (report["output_tokens_per_s"], simulated.output_tokens_per_s),
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
