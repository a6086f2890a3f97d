"""Configuration: one frozen ServerArgs, whose fields are the command line's flags. The only reader of the environment.

A field is declared once: its type and default here, its help, group and aliases in `flag(...)`. The command line
(command_line.py), the environment and a TOML file (settings.py) take their names from it. SGLang's names come first,
vLLM's common names are aliases.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec

from .flags import flag

GOMP_SPINCOUNT = "20000"  # iterations, some 0.1 ms: threads that wait longer than that give their core away
QUEUED_KV_CACHES = 8  # --max-queued-tokens where it is not given, in sizes of the KV cache
AUTO_CHUNK = 0  # --chunked-prefill-size auto
SCHEDULE_POLICIES = ("fcfs", "lof", "random", "routing-key", "lpm", "dfs-weight")
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "priority")


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `millstream serve` can be told. Checked once by config_checks.check_args, then only read."""

    model_path: Annotated[
        str,
        flag(
            "model",
            "a directory with safetensors and config.json, a .gguf file, or smollm2 (the packaged model)",
            "--model",
            metavar="MODEL",
        ),
    ]
    served_model_name: Annotated[
        tuple[str, ...],
        flag(
            "model",
            "the names that clients use, the first one in answers (default: the last part of MODEL)",
            metavar="NAME",
        ),
    ] = ()
    load_format: Annotated[
        str,
        flag(
            "model",
            "where weights come from; dummy draws random ones",
            choices=("auto", "safetensors", "gguf", "dummy"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        flag(
            "model",
            "auto is bfloat16 where the device multiplies it in hardware, else float32",
            choices=("auto", "bfloat16", "float16", "float32"),
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        flag(
            "model",
            "on CPU. auto keeps a GGUF file's Q4_0, Q4_1 and Q8_0 as they are, and where --dtype auto is float32 makes "
            "the rest int8; int8 and int4 quantise what is not, in groups of 32 (lm_head in 8 bits); w8a8 is int8 "
            "weights and activations; none dequantises all, as auto does without a C compiler, which the others need",
            "-q",
            choices=("auto", "none", "int8", "int4", "w8a8"),
        ),
    ] = "auto"
    context_length: Annotated[
        int | None,
        flag(
            "model",
            "longest prompt and output together, in tokens (default: the model's)",
            "--max-model-len",
            metavar="TOKENS",
            low=2,
        ),
    ] = None
    chat_template: Annotated[
        str | None, flag("model", "a Jinja file that replaces the model's chat template", metavar="FILE")
    ] = None
    sampling_defaults: Annotated[
        str,
        flag(
            "model",
            "sampling parameters that a request does not bring: model takes those of the model's "
            "generation_config.json, openai those of OpenAI's API (SGLang's routes have SGLang's)",
            choices=("model", "openai"),
        ),
    ] = "model"
    tool_call_parser: Annotated[
        str,
        flag(
            "model",
            "how the model writes tool calls: hermes (Qwen's too), llama3, mistral, deepseek, gpt-oss, none; auto finds "
            "it in the chat template, or takes the tokenizer's own response template",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        flag(
            "model",
            "how the model marks its reasoning: think (<think>, as Qwen3), deepseek-r1 (begins with it), magistral, "
            "gpt-oss, none; auto finds it in the chat template",
            metavar="NAME",
        ),
    ] = "auto"
    random_seed: Annotated[
        int | None,
        flag(
            "model",
            "seed of dummy weights and of requests that bring no seed (default: drawn)",
            "--seed",
            low=0,
            high=2**31 - 1,
            metavar="SEED",
        ),
    ] = None

    config: Annotated[
        str | None,
        flag(
            "serving",
            "a TOML file of settings; MILLSTREAM_* variables go before it, and flags before these",
            metavar="FILE",
        ),
    ] = None
    host: Annotated[str, flag("serving", "address to listen on")] = "127.0.0.1"
    port: Annotated[int, flag("serving", "port to listen on; 0 takes a free one", low=0, high=65535)] = 30000
    drain_timeout: Annotated[
        float, flag("serving", "seconds that running requests get to finish after SIGTERM", metavar="SECONDS", low=0)
    ] = 30.0
    max_body_bytes: Annotated[int, flag("serving", "largest request body", metavar="BYTES", low=1024)] = 4 * 2**20
    log_level: Annotated[str, flag("serving", "how much to log", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )
    log_requests: Annotated[bool, flag("serving", "log a line for every request that ends")] = False
    strict_params: Annotated[
        bool, flag("serving", "refuse fields of a body that the route does not know, in place of ignoring them")
    ] = False
    incremental_streaming_output: Annotated[
        bool, flag("serving", "events of a streamed /generate bring what is new, in place of all so far")
    ] = False
    sse_keep_alive_interval: Annotated[
        float,
        flag("serving", "seconds without an event after which a stream sends a comment; 0: never", low=0),
    ] = 15.0

    api_key: Annotated[
        tuple[str, ...],
        flag("access", "a key that clients need; several: again, or with commas", metavar="KEY", is_secret=True),
    ] = ()
    api_key_file: Annotated[
        str | None, flag("access", "more keys, one a line; lines that begin with # are comments", metavar="FILE")
    ] = None
    admin_api_key: Annotated[
        str | None,
        flag(
            "access",
            "the key of routes that touch all users; they are closed without it where there are keys",
            metavar="KEY",
            is_secret=True,
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        flag(
            "access",
            "names that the Host header may have, beside this machine's own on a loopback address",
            metavar="NAME",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        flag(
            "access", "sites (https://name) whose pages may use the server from a browser; * is any", metavar="ORIGIN"
        ),
    ] = ()

    max_running_requests: Annotated[
        int, flag("scheduling", "most requests in one batch", "--max-num-seqs", metavar="N", low=1, high=65536)
    ] = 256
    chunked_prefill_size: Annotated[
        int,
        flag(
            "scheduling",
            "most prompt tokens computed in one step, at least a page; auto follows the measured step times; "
            "-1 switches chunking off (default: auto)",
            "--max-num-batched-tokens",
            metavar="TOKENS",
            low=-1,
            words={"auto": AUTO_CHUNK},
        ),
    ] = AUTO_CHUNK
    max_prefill_tokens: Annotated[
        int, flag("scheduling", "most prompt tokens admitted in one step, at least a page", metavar="TOKENS", low=1)
    ] = 16384
    schedule_policy: Annotated[str, flag("scheduling", "order of the waiting queue", choices=SCHEDULE_POLICIES)] = (
        "fcfs"
    )
    schedule_ageing_steps: Annotated[
        int,
        flag(
            "scheduling",
            "steps after which a waiting request goes ahead of the policy's order, first come first served",
            metavar="STEPS",
            low=1,
        ),
    ] = 1000
    enable_priority_scheduling: Annotated[
        bool, flag("scheduling", "higher `priority` of a request first; over fcfs or lof")
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, flag("scheduling", "lower values of `priority` are the more urgent ones")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        flag(
            "scheduling",
            "a waiting request takes the place of running ones whose priority is lower by more than this",
            metavar="N",
            low=0,
        ),
    ] = 10
    schedule_conservativeness: Annotated[
        float, flag("scheduling", "higher reserves more KV memory for outputs and retracts less", low=0, high=100)
    ] = 1.0
    disable_overlap_schedule: Annotated[
        bool, flag("scheduling", "plan a step only after the one before has returned")
    ] = False
    max_queued_requests: Annotated[
        int, flag("scheduling", "most requests that wait; more are answered with 429", metavar="N", low=1)
    ] = 2048
    max_queued_tokens: Annotated[
        int | None,
        flag(
            "scheduling",
            "most prompt tokens that wait; more are answered with 429 (default: 8 times the KV cache)",
            metavar="TOKENS",
            low=1,
        ),
    ] = None
    request_waiting_timeout: Annotated[
        float,
        flag(
            "scheduling",
            "seconds that a request may wait for its first step, then 503; 0: no limit",
            metavar="SECONDS",
            low=0,
        ),
    ] = 600.0
    request_timeout: Annotated[
        float,
        flag("scheduling", "seconds that a request may take in all, then 504; 0: no limit", metavar="SECONDS", low=0),
    ] = 3600.0
    record_schedule: Annotated[
        str | None,
        flag("scheduling", "write every event and decision of the scheduler, for `millstream replay`", metavar="FILE"),
    ] = None
    watchdog_timeout: Annotated[
        float,
        flag(
            "scheduling",
            "seconds after which a step that has not returned, or a silent process, ends the server",
            metavar="SECONDS",
            low=1,
        ),
    ] = 300.0

    page_size: Annotated[
        int, flag("memory", "tokens in a KV page: a power of two", "--block-size", metavar="TOKENS", low=1, high=1024)
    ] = 16
    mem_fraction_static: Annotated[
        float | None,
        flag(
            "memory",
            "share of memory for weights and KV cache (default on CPU: 4 GiB or a quarter of what is free)",
            "--gpu-memory-utilization",
            low=0.01,
            high=0.99,
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        flag("memory", "size of the KV cache in tokens, instead of what memory allows", metavar="TOKENS", low=1),
    ] = None
    radix_eviction_policy: Annotated[
        str, flag("memory", "which cached prefixes go first when pages are short", choices=EVICTION_POLICIES)
    ] = "lru"
    disable_radix_cache: Annotated[
        bool, flag("memory", "share no prefixes between requests", "--no-enable-prefix-caching")
    ] = False

    tp_size: Annotated[
        int, flag("devices", "tensor-parallel ranks", "--tp", "--tensor-parallel-size", metavar="N", low=1, high=64)
    ] = 1
    device: Annotated[str, flag("devices", "where the model runs", choices=("auto", "cpu", "cuda"))] = "auto"
    kernel_backend: Annotated[
        str, flag("devices", "torch forces the reference version of every operator", choices=("auto", "torch"))
    ] = "auto"
    disable_custom_all_reduce: Annotated[
        bool, flag("devices", "on CPU, use gloo between ranks in place of shared memory")
    ] = False


class ChildConfig(msgspec.Struct, frozen=True):
    """What a child process is started with, sent through its standard input."""

    name: str
    rank: int
    run_dir: str
    instance_id: int
    args: ServerArgs
    shared_memory_fd: int = -1  # the ranks' collective buffers (memfd), -1 where unused
    keeps_dense: bool = True  # a dense copy of the layers that have a quantised one


def process_environment() -> dict[str, str]:
    """The environment variables of this process."""
    return dict(os.environ)


def child_environment() -> dict[str, str]:
    """The environment of child processes: ours, with this package importable by the same name.

    GNU OpenMP's threads spin for milliseconds by default, which costs others whole time slices where there are more
    runnable threads than cores; a tenth of one bridges the gap between two operators.
    """
    package_parent = str(Path(__file__).parent.parent.parent) if _is_installed() else str(_source_root() / ".pkg")
    paths = [package_parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TOKENIZERS_PARALLELISM": "false"}
    return {"GOMP_SPINCOUNT": GOMP_SPINCOUNT, **os.environ, **ours}


def cache_dir() -> Path:
    """Where built kernels are kept: $XDG_CACHE_HOME/millstream or ~/.cache/millstream."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millstream"


def temporary_dir() -> Path:
    """Where run directories are made: $TMPDIR where a socket path fits under it, else /tmp."""
    base = os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - the directory made in it is private
    return Path(base if len(base) <= 40 else "/tmp")  # noqa: S108


def wants_progress_bar() -> bool:
    """Whether standard error is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _is_installed() -> bool:
    return Path(__file__).parent.parent.name == "millstream"


def _source_root() -> Path:
    return Path(__file__).parent.parent
