"""`millstream simulate`: run the scheduler in virtual time and report what clients would see, or fit a cost model."""

import gc
import logging
import sys
from pathlib import Path

import msgspec
import numpy as np

from ...common.config import ServerArgs
from ...common.flags import ConfigError
from ...common.logs import quiet_below
from ...common.messages import KVGroup, WorkerReady
from ..recording.recording import RecordingError
from ..scheduler import Scheduler
from ..scheduler_config import SchedulerConfig
from ..start_up import scheduler_config
from .cost_fit import FitError
from .cost_model import CostModel, CostModelError, load_cost_model
from .distribution import Int64Array, Lengths, parse_lengths
from .fit_command import fit
from .metrics import Measurements, Report
from .notes import notes
from .plot import PlotError, check_matplotlib, write_plot
from .report import json_lines, table
from .simulate_args import CommandLine, SimulateArgs, parse_simulate_args
from .simulation import Simulation, SimulationError
from .trace_file import TraceError, read_trace
from .workload import Trace, Workload, make_trace

BAD_COMMAND_LINE = 2
DEFAULT_NUM_REQUESTS = 1000
USER_ERRORS = (ConfigError, CostModelError, FitError, PlotError, RecordingError, TraceError)


def main(argv: list[str]) -> int:
    """0, or 1 if the scheduler left requests without an end, or 2 for what the user must change (in one line)."""
    try:
        command = parse_simulate_args(argv)
        costs = load_cost_model(command.args.cost_model)
        with quiet_below(logging.ERROR, Scheduler.__module__.rpartition(".")[0]):
            return fit(command.args, costs) if command.args.fit is not None else _simulate(command, costs)
    except USER_ERRORS as error:
        print(f"millstream simulate: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_COMMAND_LINE
    except SimulationError as error:
        print(f"millstream simulate: {error}", file=sys.stderr)
        return 1


def _simulate(command: CommandLine, costs: CostModel) -> int:
    args, tp_size, recorded = command.args, command.server_args.tp_size, command.recorded
    if args.plot is not None:
        check_matplotlib()
    aside = sys.stderr if args.json else sys.stdout  # for what is no figure
    if recorded is not None:
        print(recorded, file=aside)
    config = simulation_config(command.server_args, costs, recorded.config.context_len if recorded else None)
    trace = load_trace(args, costs, config.context_len)
    gc.freeze()  # the trace stays: no collection needs to look at it again
    runs: list[tuple[Report, Measurements]] = []
    for policy in command.policies:
        policy_config = msgspec.structs.replace(config, schedule_policy=policy)
        measurements = Simulation(Scheduler(policy_config), costs, tp_size, trace).run()
        report = measurements.report(policy, _input_lens(trace), _priorities(trace), args.ttft_target, args.tpot_target)
        runs.append((report, measurements))
        if args.json:
            print(json_lines([report]), flush=True)
    title, reports = _title(command, config, trace), [report for report, _ in runs]
    if not args.json:
        print(f"{title}\n\n{table(reports)}")
    for note in notes(reports, trace):
        print(note, file=aside)
    if args.plot is not None:
        write_plot(Path(args.plot), title, reports, [each.curves() for _, each in runs])
        print(f"wrote {args.plot}", file=aside)
    return 0


def simulation_config(server_args: ServerArgs, costs: CostModel, context_len: int | None = None) -> SchedulerConfig:
    """The server's own way from flags and workers to a configuration; ConfigError where the weights do not fit.

    The context is the model's where none is given. The vocabulary is one larger than the model's: the last id is EOS.
    """
    num_tokens = server_args.max_total_tokens or costs.num_kv_tokens(server_args.tp_size)
    num_pages = num_tokens // server_args.page_size
    if not num_pages:
        raise ConfigError("the cost model's weights leave no memory for KV pages; see --tp-size and --max-total-tokens")
    model = costs.model
    worker = WorkerReady(
        rank=0,
        kv_groups=[KVGroup("full", 1, int(model.kv_bytes_per_token) * server_args.page_size, num_pages)],
        vocab_size=model.vocab_size + 1,
        context_len=context_len or model.context_len,
        max_running_requests=server_args.max_running_requests,
        weight_bytes=int(model.weight_bytes),
    )
    return scheduler_config(server_args, [worker])


def load_trace(args: SimulateArgs, costs: CostModel, context_len: int) -> Trace:
    """What the flags ask for; ConfigError or TraceError."""
    if args.trace is None:
        return make_trace(_workload(args, context_len))
    trace = read_trace(
        Path(args.trace),
        vocab_size=costs.model.vocab_size,
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.ignore_eos,
        block_len=args.hash_block_len,
    )
    trace.requests = trace.requests[: args.num_requests]
    if args.arrival == "closed":
        trace.num_users = args.num_users
        rng = np.random.default_rng(args.seed)
        for request in trace.requests:
            request.arrival = None
            request.think_seconds = rng.exponential(args.think_time) if args.think_time else 0.0
    return trace


def _workload(args: SimulateArgs, context_len: int) -> Workload:
    return Workload(
        num_requests=args.num_requests or DEFAULT_NUM_REQUESTS,
        arrival=args.arrival or "poisson",
        request_rate=args.request_rate,
        arrival_cv=args.arrival_cv,
        num_users=args.num_users,
        think_seconds=args.think_time,
        input_len=_lengths("--input-len", args.input_len),
        output_len=_lengths("--output-len", args.output_len),
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.ignore_eos,
        shared_prefix=args.shared_prefix,
        num_prefixes=args.num_prefixes,
        prefix_zipf=args.prefix_zipf,
        turns=_lengths("--turns", args.turns),
        tree_depth=args.tree_depth,
        tree_branching=args.tree_branching,
        tree_node_len=args.tree_node_len,
        priority_levels=args.priority_levels,
        context_len=context_len,
        seed=args.seed,
    )


def _lengths(flag: str, text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _input_lens(trace: Trace) -> Int64Array:
    return np.array([request.input_len for request in trace.requests], np.int64)


def _priorities(trace: Trace) -> Int64Array:
    return np.array([request.priority or 0 for request in trace.requests], np.int64)


def _title(command: CommandLine, config: SchedulerConfig, trace: Trace) -> str:
    num_inputs = sum(request.input_len for request in trace.requests)
    num_outputs = sum(request.output_len for request in trace.requests)
    return (
        f"{len(trace.requests):,} requests, {num_inputs:,} prompt and {num_outputs:,} output tokens; "
        f"{command.args.cost_model}, tp {command.server_args.tp_size}, {config.num_kv_tokens:,} KV tokens"
    )
