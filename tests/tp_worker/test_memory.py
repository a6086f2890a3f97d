"""How much memory the KV cache takes, from flags, machine and cgroups."""

from pathlib import Path
from typing import Any

import pytest

from millstream.common import cpu
from millstream.common.config import ServerArgs
from millstream.common.flags import ConfigError
from millstream.common.memory_plan import available_host_memory, plan_kv_pages

GB = 10**9


def plan(available_bytes: int, *, device: str = "cpu", weight_bytes: int = GB, **flags: Any) -> int:
    """Pages of 16 tokens of 1000 bytes each."""
    args = ServerArgs(model_path="m", **flags)
    return plan_kv_pages(
        args,
        device=device,
        kv_bytes_per_token=1000,
        weight_bytes=weight_bytes,
        context_len=100_000,
        available_bytes=available_bytes,
    )


def test_on_cpu_a_quarter_of_what_is_left_is_taken() -> None:
    assert plan(9 * GB) == 2 * GB // 16_000


def test_on_cpu_no_more_than_4_gib_are_taken() -> None:
    assert plan(100 * GB) == 4 * 2**30 // 16_000


def test_mem_fraction_static_counts_weights_and_cache_together() -> None:
    assert plan(10 * GB, mem_fraction_static=0.5) == 4 * GB // 16_000
    assert plan(10 * GB, mem_fraction_static=0.5, device="cuda") == 4 * GB // 16_000


def test_max_total_tokens_goes_first_and_is_rounded_down_to_pages() -> None:
    assert plan(0, max_total_tokens=100, mem_fraction_static=0.5) == 6


def test_no_more_pages_than_all_running_requests_can_fill() -> None:
    assert plan(100 * GB, max_running_requests=2) == 2 * 100_000 // 16


@pytest.mark.parametrize("flags", [{}, {"mem_fraction_static": 0.1}])
def test_too_little_memory_is_refused_with_the_numbers(flags: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="1010 MB are free and the weights take 1010 MB"):
        plan(1_010_000_000, weight_bytes=1_010_000_000, **flags)


def write(root: Path, files: dict[str, str]) -> Path:
    """A file tree like the kernel's."""
    for name, text in {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 8000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert available_host_memory(write(tmp_path, {})) == 8000 * 1024


def test_the_tightest_cgroup_above_us_decides_and_its_page_cache_counts_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/memory.max": "5000000\n",
        "sys/fs/cgroup/a/memory.current": "4000000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 7\ninactive_file 2500000\n",
    }
    assert available_host_memory(write(tmp_path, files)) == 3_500_000


def test_the_first_cgroup_version_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/x\n4:memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "2000000\n",
        "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 10\n",
    }
    assert available_host_memory(write(tmp_path, files)) == 1_000_010


def test_a_cgroup_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert available_host_memory(write(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [("flags\t\t: fpu avx512f avx512_bf16\n", True), ("flags\t: avx2\n", False), ("Features : fp bf16\n", True)],
)
def test_bfloat16_is_seen_in_the_flags_of_the_cpu(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    assert cpu.multiplies_bfloat16(write(tmp_path, {"proc/cpuinfo": cpuinfo})) == expected


def test_hyper_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 9})
    siblings = {0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"}
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": s for n, s in siblings.items()}
    assert cpu.num_physical_cores(write(tmp_path, files)) == 3
    assert cpu.num_physical_cores(write(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000\n"})) == 2
    assert cpu.num_physical_cores(write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})) == 3
