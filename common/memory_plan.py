"""How many KV pages fit: pure arithmetic, shared by the start-up plan and the workers, and what a host has free."""

from pathlib import Path

from .config import ServerArgs
from .flags import ConfigError

CPU_KV_BYTES = 4 * 2**30
CPU_KV_SHARE = 0.25
CUDA_STATIC_SHARE = 0.85
ROOT = Path("/")


def plan_kv_pages(
    args: ServerArgs,
    *,
    device: str,
    kv_bytes_per_token: int,
    weight_bytes: int,
    context_len: int,
    available_bytes: int,
) -> int:
    """Pages of the KV cache. ConfigError, with the numbers, where not even one fits.

    `available_bytes` is free before weights are loaded: on CPU what the host leaves to all ranks together, with
    `kv_bytes_per_token` and `weight_bytes` summed over the ranks; on CUDA those of one rank and its device.
    Never more than `max_running_requests` full contexts, unless `--max-total-tokens` says so.
    """
    if args.max_total_tokens is not None:
        return args.max_total_tokens // args.page_size
    budget = _kv_budget(args, device, weight_bytes, available_bytes)
    num_pages = int(budget // (kv_bytes_per_token * args.page_size))
    if num_pages < 1:
        raise ConfigError(
            f"no memory for a KV cache: {available_bytes / 1e6:.0f} MB are free and the weights take "
            f"{weight_bytes / 1e6:.0f} MB; free some, or set --mem-fraction-static or --max-total-tokens"
        )
    return min(num_pages, args.max_running_requests * -(-context_len // args.page_size))


def available_host_memory(root: Path = ROOT) -> int:
    """Bytes that this process may still take: what the machine has free, and what each cgroup above us leaves.

    Page cache counts as free. Reads /proc/meminfo and cgroup v2 or v1 files below `root`.
    """
    return max(0, min([_machine_available(root), *_cgroups_leave(root)]))


def _kv_budget(args: ServerArgs, device: str, weight_bytes: int, available_bytes: int) -> float:
    share = args.mem_fraction_static
    if share is None and device == "cpu":
        return min(CPU_KV_BYTES, CPU_KV_SHARE * (available_bytes - weight_bytes))
    return (CUDA_STATIC_SHARE if share is None else share) * available_bytes - weight_bytes


def _machine_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


def _cgroups_leave(root: Path) -> list[int]:
    """What every memory cgroup from ours to the root leaves; one without a limit leaves out."""
    found = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(base))):
            left = _cgroup_leaves(level, *names)
            found += [] if left is None else [left]
    return found


def _cgroup_leaves(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
    if limit is None or usage is None:
        return None
    stat = dict(line.split(maxsplit=1) for line in _read_lines(folder / "memory.stat") if " " in line)
    return limit - usage + int(stat.get(cache_name, 0))


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says "max"."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
