"""Checks of ServerArgs: each flag alone, and beside the others."""

import re

from .config import CACHE_AWARE_POLICIES, ServerArgs
from .flags import ConfigError, check_ranges, flag_name

ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/\s]+/?", re.IGNORECASE)


def check_args(args: ServerArgs) -> ServerArgs:
    """Raise ConfigError naming the first flag that is wrong, alone or beside others; returns the args."""
    check_ranges(args)
    if not all(args.served_model_name):
        raise ConfigError("--served-model-name must not be empty")
    if args.page_size & (args.page_size - 1):
        raise ConfigError(f"--page-size must be a power of two, not {args.page_size}")
    for origin in args.allowed_origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allowed-origins must be * or like https://name, not {origin!r}")
    _check_scheduling(args)
    _check_quantization(args)
    if args.max_total_tokens is not None and args.max_total_tokens < args.page_size:
        raise ConfigError(f"--max-total-tokens must hold at least one page of {args.page_size} tokens")
    return args


def _check_quantization(args: ServerArgs) -> None:
    """Refuse formats that nothing multiplies there."""
    if args.quantization in ("auto", "none"):
        return
    if args.device == "cuda":
        raise ConfigError(f"--quantization {args.quantization} is not built for --device cuda yet, only for cpu")
    if args.kernel_backend == "torch":
        raise ConfigError(
            f"--quantization {args.quantization} needs the C operators that --kernel-backend torch switches off"
        )


def _check_scheduling(args: ServerArgs) -> None:
    """Refuse flags that would have no effect beside the others, or leave a step no room for a page."""
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        if 0 < getattr(args, name) < args.page_size:
            raise ConfigError(f"{flag_name(name)} must be at least a page of {args.page_size} tokens (--page-size)")
    if args.enable_priority_scheduling and args.schedule_policy not in ("fcfs", "lof"):
        raise ConfigError(f"--enable-priority-scheduling goes with fcfs and lof, not {args.schedule_policy}")
    if args.schedule_low_priority_values_first and not args.enable_priority_scheduling:
        raise ConfigError("--schedule-low-priority-values-first needs --enable-priority-scheduling")
    if args.disable_radix_cache and args.schedule_policy in CACHE_AWARE_POLICIES:
        raise ConfigError(
            f"--schedule-policy {args.schedule_policy} needs the cache that --disable-radix-cache switches off"
        )
