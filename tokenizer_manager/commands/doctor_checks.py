"""What `millstream doctor` looks at: the machine, the limits of this process, and what a server would need first."""

import enum
import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ...common.config import cache_dir, process_environment, temporary_dir
from ...common.config_variables import read_variables
from ...common.cpu import has_c_compiler, multiplies_bfloat16, num_physical_cores
from ...common.flags import ConfigError
from ...common.memory_plan import available_host_memory
from ...common.model_path import find_model
from ..port import bind_port
from .doctor_packages import check_packages, torch_build

LOW_MEMORY_BYTES, TOO_LITTLE_MEMORY_BYTES = 2 * 2**30, 2**29
LOW_SHARED_MEMORY_BYTES = 256 * 2**20
LOW_SPACE_BYTES = 64 * 2**20
FEW_FILES, TOO_FEW_FILES = 4096, 256
OLDEST_PYTHON = (3, 11)


class Verdict(enum.Enum):
    """How bad it is: a warning costs speed or size, a failure stops a server."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report; `fix` is there for what is not ok."""

    name: str
    verdict: Verdict
    text: str
    fix: str = ""


class Subject(msgspec.Struct, frozen=True):
    """What is examined."""

    model: str = "smollm2"
    host: str = "127.0.0.1"
    port: int = 30000
    root: Path = Path("/")  # of /dev, /proc and /sys


def check_all(subject: Subject) -> list[Finding]:
    """Every finding, in the order of the report. A check that itself fails is a finding."""
    return [_run(name, check, subject) for name, check in CHECKS.items()]


def _run(name: str, check: Callable[[Subject], tuple[Verdict, str, str]], subject: Subject) -> Finding:
    try:
        return Finding(name, *check(subject))
    except (ConfigError, OSError, ValueError) as error:
        return Finding(name, Verdict.FAIL, " ".join(str(error).split()), "mend this first")


def _python(subject: Subject) -> tuple[Verdict, str, str]:
    text = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Verdict.FAIL, text, "install Python 3.11 or newer"
    if platform.system() != "Linux" or not hasattr(os, "pidfd_open"):
        return Verdict.FAIL, text, "use Linux 5.3 or newer"
    os.close(os.pidfd_open(os.getpid()))
    return Verdict.OK, text, ""


def _packages(subject: Subject) -> tuple[Verdict, str, str]:
    found, wrong = check_packages()
    if wrong:
        return Verdict.FAIL, "; ".join(wrong), "pip install -U millstream (or: make install)"
    return Verdict.OK, f"{len(found)} found: " + ", ".join(f"{name} {version}" for name, version in found.items()), ""


def _torch(subject: Subject) -> tuple[Verdict, str, str]:
    version, cuda = torch_build()
    if version is None:
        return Verdict.FAIL, "PyTorch is not installed", "pip install torch"
    if _gpus(subject) and not cuda:
        return (
            Verdict.WARN,
            f"{version}, built without CUDA",
            "install a CUDA build of torch, or serve with --device cpu",
        )
    return Verdict.OK, f"{version}, " + (f"for CUDA {cuda}" if cuda else "for CPUs"), ""


def _gpu(subject: Subject) -> tuple[Verdict, str, str]:
    devices = _gpus(subject)
    if not devices:
        return Verdict.OK, "none; models run on the CPU", ""
    closed = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if closed:
        return (
            Verdict.FAIL,
            f"no right to use {', '.join(closed)}",
            "join the group that owns the devices, or see --device cpu",
        )
    driver = subject.root / "proc/driver/nvidia/version"
    text = f"{len(devices)} of NVIDIA's"
    if not driver.exists():
        return Verdict.WARN, f"{text}, but no driver", "load NVIDIA's driver, or serve with --device cpu"
    return Verdict.OK, f"{text}; {driver.read_text().splitlines()[0]}", ""


def _cpu(subject: Subject) -> tuple[Verdict, str, str]:
    kind = "bfloat16 in hardware" if multiplies_bfloat16(subject.root) else "no bfloat16: int8 weights and float32"
    return Verdict.OK, f"{num_physical_cores(subject.root)} cores, {kind}", ""


def _compiler(subject: Subject) -> tuple[Verdict, str, str]:
    if has_c_compiler():
        return Verdict.OK, "there is one; `millstream kernels` shows what it builds", ""
    return Verdict.WARN, "no C compiler: slow operators on the CPU", "apt-get install gcc libc6-dev"


def _memory(subject: Subject) -> tuple[Verdict, str, str]:
    free = available_host_memory(subject.root)
    text = f"{free / 2**30:.1f} GiB are free for weights and KV cache"
    if free < TOO_LITTLE_MEMORY_BYTES:
        return Verdict.FAIL, text, "end other programs, or raise the container's memory limit"
    return (Verdict.OK, text, "") if free >= LOW_MEMORY_BYTES else (Verdict.WARN, text, "small models only")


def _shared_memory(subject: Subject) -> tuple[Verdict, str, str]:
    os.close(os.memfd_create("millstream-doctor"))
    folder = subject.root / "dev/shm"
    if not folder.is_dir():
        return Verdict.WARN, "no /dev/shm: NCCL needs it for several GPUs", "mount a tmpfs at /dev/shm"
    size = os.statvfs(folder)
    free = size.f_bavail * size.f_frsize
    text = f"{free / 2**20:,.0f} MiB are free in /dev/shm"
    if free < LOW_SHARED_MEMORY_BYTES and _gpus(subject):
        return Verdict.WARN, text, "start the container with --shm-size 1g"
    return Verdict.OK, text, ""


def _limits(subject: Subject) -> tuple[Verdict, str, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return Verdict.OK, "open files: " + ("no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"), ""
    verdict = Verdict.FAIL if soft < TOO_FEW_FILES else Verdict.WARN
    return verdict, f"{soft:,} open files, and every client takes one", f"ulimit -n {max(hard, FEW_FILES)}"


def _sockets(subject: Subject) -> tuple[Verdict, str, str]:
    base = temporary_dir()
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=base) as folder, socket.socket(socket.AF_UNIX) as each:
        each.bind(f"{folder}/tokenizer_manager-scheduler")
    return Verdict.OK, f"run directories can be made in {base}", ""


def _cache(subject: Subject) -> tuple[Verdict, str, str]:
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Verdict.WARN, f"{folder}: {error.strerror}", "set XDG_CACHE_HOME to a directory that can be written"
    size = os.statvfs(folder)
    free = size.f_bavail * size.f_frsize
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    return (
        (Verdict.OK, text, "") if free >= LOW_SPACE_BYTES else (Verdict.WARN, text, "make room, or set XDG_CACHE_HOME")
    )


def _port(subject: Subject) -> tuple[Verdict, str, str]:
    try:
        bind_port(subject.host, subject.port).close()
    except ConfigError as error:
        text, _, advice = str(error).partition("; ")
        return Verdict.FAIL, text, advice or "choose another with --host and --port"
    return Verdict.OK, f"{subject.port} on {subject.host} is free", ""


def _model(subject: Subject) -> tuple[Verdict, str, str]:
    try:
        return Verdict.OK, str(find_model(subject.model)), ""
    except ConfigError as error:
        text, _, advice = str(error).partition("; run: ")
        verdict = Verdict.WARN if subject.model == Subject().model else Verdict.FAIL
        return verdict, text, advice or "give a directory or a .gguf file"


def _variables(subject: Subject) -> tuple[Verdict, str, str]:
    return check_variables(process_environment())


def check_variables(environment: Mapping[str, str]) -> tuple[Verdict, str, str]:
    """What the environment sets of a server."""
    values, notices = read_variables(environment)
    if notices:
        return Verdict.WARN, "; ".join(notices), "unset or rename them"
    return Verdict.OK, f"MILLSTREAM_* variables set: {', '.join(values) or 'none'}", ""


def _gpus(subject: Subject) -> list[Path]:
    return sorted((subject.root / "dev").glob("nvidia[0-9]*"))


CHECKS: dict[str, Callable[[Subject], tuple[Verdict, str, str]]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "gpu": _gpu,
    "cpu": _cpu,
    "c compiler": _compiler,
    "memory": _memory,
    "shared memory": _shared_memory,
    "limits": _limits,
    "sockets": _sockets,
    "cache": _cache,
    "port": _port,
    "model": _model,
    "environment": _variables,
}
