"""The command line of `millstream simulate`: flags of its own, and those of the server that the scheduler obeys."""

import argparse
from typing import Annotated, Any, NamedTuple

import msgspec

from ...common.command_line import Parser, add_flags
from ...common.config import SCHEDULE_POLICIES, ServerArgs
from ...common.config_checks import check_args
from ...common.flags import ConfigError, Flag, check_ranges, flag, flag_name, flags
from .cost_model import packaged_names
from .distribution import ARRIVALS, SYNTAX
from .plot import check_plot_path
from .recorded_config import RecordedConfig, read_recorded_config

GROUP_TITLES = {
    "trace": "what is asked (a trace from a file, or a synthetic one)",
    "workers": "what the workers cost",
    "report": "what is reported",
    "fit": "fitting a cost model to a recorded run",
    "scheduling": "the scheduler, as in millstream serve",
    "memory": "KV cache, as in millstream serve",
    "devices": "parallelism, as in millstream serve",
}
SERVER_FLAGS = (
    "max_running_requests",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "schedule_ageing_steps",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "schedule_conservativeness",
    "disable_overlap_schedule",
    "max_queued_requests",
    "max_queued_tokens",
    "request_waiting_timeout",
    "request_timeout",
    "page_size",
    "max_total_tokens",
    "radix_eviction_policy",
    "disable_radix_cache",
    "tp_size",
)
ONLY_SYNTHETIC = (
    "request_rate",
    "arrival_cv",
    "input_len",
    "output_len",
    "shared_prefix",
    "num_prefixes",
    "prefix_zipf",
    "turns",
    "tree_depth",
    "tree_branching",
    "tree_node_len",
    "priority_levels",
)
FIT_FLAGS = {"fit", "out", "cost_model", "json"}
EPILOG = f"""\
LENGTHS are {SYNTAX}. Output lengths are hidden from the scheduler:
it knows max_new_tokens, and learns of an end from the worker. Times are virtual; the result depends on the flags alone.
Policies differ only where requests wait, and over what they look at: lof over max_new_tokens, routing-key over routing
keys (those of --shared-prefix, --tree-depth or a recording), lpm and dfs-weight over shared prefixes (also --turns). """


class SimulateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What `millstream simulate` can be told beside the server's flags."""

    trace: Annotated[
        str | None,
        flag(
            "trace",
            "JSON lines of arrival, input_length, output_length (and hash_ids), or what --record-schedule wrote; the "
            "recorded configuration of the scheduler holds where no flag says otherwise",
            metavar="FILE",
        ),
    ] = None
    hash_block_len: Annotated[
        int, flag("trace", "tokens that each of a trace's hash_ids stands for", metavar="TOKENS", low=1, high=65536)
    ] = 512
    num_requests: Annotated[
        int | None,
        flag("trace", "requests in all, turns included (default: 1000, or all of the trace)", metavar="N", low=1),
    ] = None
    arrival: Annotated[
        str | None,
        flag(
            "trace",
            "how requests arrive; closed: each of --num-users waits for its answer (default: poisson, or the trace's)",
            choices=ARRIVALS,
        ),
    ] = None
    request_rate: Annotated[
        float,
        flag("trace", "arrivals a second; with --turns, of conversations", metavar="RATE", low=1e-6, high=1e6),
    ] = 1.0
    arrival_cv: Annotated[
        float,
        flag("trace", "deviation over mean of gamma's gaps; over 1 is bursty", metavar="CV", low=0.01, high=100),
    ] = 2.0
    num_users: Annotated[int, flag("trace", "users of the closed loop", metavar="N", low=1, high=10**6)] = 8
    think_time: Annotated[
        float,
        flag("trace", "mean pause before a next turn or a user's next request", metavar="SECONDS", low=0, high=1e6),
    ] = 0.0
    input_len: Annotated[str, flag("trace", "new prompt tokens of a request", metavar="LENGTHS")] = "exponential:256"
    output_len: Annotated[str, flag("trace", "output tokens of a request", metavar="LENGTHS")] = "exponential:128"
    max_new_tokens: Annotated[
        int | None,
        flag(
            "trace",
            "what every request asks for at most, and longer outputs are cut to (default: a request asks for the next "
            "power of two above its own output, at least 16; in a file for the longest output)",
            metavar="TOKENS",
            low=1,
        ),
    ] = None
    ignore_eos: Annotated[bool, flag("trace", "requests ask for exactly their output, as benchmarks do")] = False
    shared_prefix: Annotated[
        int, flag("trace", "tokens of a document that first prompts begin with", metavar="TOKENS", low=0, high=10**6)
    ] = 0
    num_prefixes: Annotated[int, flag("trace", "documents to choose from", metavar="N", low=1, high=10**6)] = 16
    prefix_zipf: Annotated[
        float, flag("trace", "popularity: the k-th document has a weight of k to the minus this", low=0, high=10)
    ] = 1.0
    turns: Annotated[str, flag("trace", "turns of a conversation", metavar="LENGTHS")] = "1"
    tree_depth: Annotated[
        int, flag("trace", "nodes on a path of the tree that first prompts begin with", metavar="N", low=0, high=16)
    ] = 0
    tree_branching: Annotated[int, flag("trace", "children of a node", metavar="N", low=1, high=64)] = 4
    tree_node_len: Annotated[
        int, flag("trace", "tokens of a node of the tree", metavar="TOKENS", low=1, high=10**6)
    ] = 256
    priority_levels: Annotated[
        int,
        flag(
            "trace",
            "requests draw a priority from 0 to this minus 1; with --enable-priority-scheduling",
            metavar="N",
            low=1,
            high=1000,
        ),
    ] = 1
    seed: Annotated[int, flag("trace", "seed of everything that is drawn", metavar="SEED", low=0, high=2**31 - 1)] = 0

    cost_model: Annotated[
        str, flag("workers", f"{', '.join(packaged_names())}, or a JSON file", metavar="NAME|FILE")
    ] = "h200"

    policies: Annotated[
        str | None,
        flag(
            "report",
            f"policies to compare, with commas: {', '.join(SCHEDULE_POLICIES)} (default: fcfs, or the recorded one)",
            metavar="LIST",
        ),
    ] = None
    ttft_target: Annotated[
        float, flag("report", "milliseconds to the first token that goodput allows", metavar="MS", low=0)
    ] = 1000.0
    tpot_target: Annotated[
        float, flag("report", "milliseconds a token after the first that goodput allows", metavar="MS", low=0)
    ] = 50.0
    json: Annotated[bool, flag("report", "print JSON lines, one for each policy, in place of the table")] = False
    plot: Annotated[str | None, flag("report", "also draw FILE.png; needs matplotlib", metavar="FILE")] = None

    fit: Annotated[
        str | None,
        flag(
            "fit",
            "what --record-schedule wrote with one rank: fit its times, over the sizes of --cost-model, and stop",
            metavar="RECORDED",
        ),
    ] = None
    out: Annotated[str | None, flag("fit", "where the fitted cost model goes: a new file", metavar="FILE")] = None


class CommandLine(NamedTuple):
    """What was asked, what the scheduler obeys, and where a recording's configuration takes part in it."""

    args: SimulateArgs
    server_args: ServerArgs
    policies: list[str]
    recorded: RecordedConfig | None


def parse_simulate_args(argv: list[str]) -> CommandLine:
    """Parse and check; ConfigError, RecordingError or TraceError names flag or file. Prints and exits on --help."""
    if any(word.split("=")[0] == "--schedule-policy" for word in argv):
        raise ConfigError("unknown argument --schedule-policy; did you mean --policies?")
    values = vars(_make_parser().parse_known_flags(argv))
    server = {name: values.pop(name) for name in SERVER_FLAGS if name in values}
    args = SimulateArgs(**values)
    check_ranges(args)
    _check_together(args, values, server)
    policies = None if args.policies is None else _split_policies(args.policies)
    recorded = read_recorded_config(args.trace, SERVER_FLAGS, server, policies)
    seed = args.seed
    if recorded is not None:
        server = {**recorded.flags, **server}
        policies = policies or [recorded.config.schedule_policy]
        seed = args.seed if "seed" in values else recorded.config.random_seed
    policies = policies or ["fcfs"]
    checked = [
        check_args(ServerArgs(model_path="", schedule_policy=each, random_seed=seed, **server)) for each in policies
    ]
    return CommandLine(args, checked[0], policies, recorded)


def _split_policies(text: str) -> list[str]:
    """The policies to compare, in order; ConfigError for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCHEDULE_POLICIES:
            raise ConfigError(f"--policies takes {', '.join(SCHEDULE_POLICIES)}, not {name!r}")
    return list(dict.fromkeys(names))


def _make_parser() -> Parser:
    parser = Parser(
        prog="millstream simulate",
        usage="millstream simulate [flags]",
        description="Run the scheduler in virtual time against a cost model of the workers, and report what clients "
        "would see under each policy.",
        epilog=EPILOG,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUP_TITLES.items()}
    add_flags(groups, flags(SimulateArgs))
    add_flags(groups, {name: _server_flag(name) for name in SERVER_FLAGS})
    return parser


def _server_flag(name: str) -> tuple[type, Any, Flag]:
    """As the server declares it; the default of the KV cache's size is another."""
    kind, default, declared = flags(ServerArgs)[name]
    if name == "max_total_tokens":
        text = "size of the KV cache in tokens (default: what fits beside the weights)"
        declared = msgspec.structs.replace(declared, help=text)
    return kind, default, declared


def _check_together(args: SimulateArgs, given: dict[str, Any], server: dict[str, Any]) -> None:
    """Raise ConfigError for a flag that means nothing beside the others."""
    if (args.fit is None) != (args.out is None):
        raise ConfigError("--fit RECORDED and --out FILE go together")
    if args.fit is not None and "cost_model" not in given:
        raise ConfigError(
            f"--fit needs --cost-model: one of the model that was recorded ({', '.join(packaged_names())}, or a file)"
        )
    if args.plot is not None:
        check_plot_path(args.plot)
    if args.trace is not None and args.arrival not in {None, "closed"}:
        raise ConfigError(f"--arrival with --trace must be closed, not {args.arrival}")
    if args.shared_prefix and args.tree_depth:
        raise ConfigError("--shared-prefix and --tree-depth exclude each other")
    is_closed = args.arrival == "closed"
    conditions = (
        (ONLY_SYNTHETIC, args.trace is None, "goes with a synthetic trace, not with --trace"),
        (("hash_block_len",), args.trace is not None, "goes with --trace"),
        (("request_rate",), not is_closed, "does not go with --arrival closed"),
        (("num_users",), is_closed, "goes with --arrival closed"),
        (("arrival_cv",), args.arrival == "gamma", "goes with --arrival gamma"),
        (("think_time",), is_closed or "turns" in given, "goes with --turns or --arrival closed"),
        (("num_prefixes", "prefix_zipf"), args.shared_prefix > 0, "goes with --shared-prefix"),
        (("tree_branching", "tree_node_len"), args.tree_depth > 0, "goes with --tree-depth"),
        (("priority_levels",), "enable_priority_scheduling" in server, "goes with --enable-priority-scheduling"),
        (tuple(sorted((given.keys() | server.keys()) - FIT_FLAGS)), args.fit is None, "does not go with --fit"),
    )
    for names, holds, text in conditions:
        for name in names:
            if (name in given or name in server) and not holds:
                raise ConfigError(f"{flag_name(name)} {text}")
