"""What this machine's CPUs are, as far as the defaults depend on it."""

import os
import shutil
from pathlib import Path

ROOT = Path("/")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 "flags", arm64 "Features"
C_COMPILERS = ("gcc", "cc", "clang")  # those that kernels/compiler.py tries


def multiplies_bfloat16(root: Path = ROOT) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.split(":")[0].strip() in {"flags", "Features"}), "")
    return bool(BFLOAT16_FLAGS & set(flags.split()))


def has_c_compiler() -> bool:
    """Whether there is a compiler to build the C operators with."""
    return any(shutil.which(name) for name in C_COMPILERS)


def num_physical_cores(root: Path = ROOT) -> int:
    """Cores that this process may keep busy: physical ones, no more than the cgroup's CPU quota allows."""
    return max(1, min([len(physical_cores(root)), *_quota(root)]))


def physical_cores(root: Path = ROOT) -> list[int]:
    """One CPU number of every core that this process may run on: hyper-threads of one core count once."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings.strip(), cpu)
    return list(cores.values())


def _quota(root: Path) -> list[int]:
    """Whole cores that the cgroup's quota allows, if it has one (v2's cpu.max, else v1's cfs files)."""
    try:
        words = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        words = _quota_v1(root / "sys/fs/cgroup/cpu")
    if len(words) != 2 or not words[0].isdecimal():
        return []
    return [max(1, round(int(words[0]) / int(words[1])))]


def _quota_v1(folder: Path) -> list[str]:
    try:
        return [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
    except OSError:
        return []
