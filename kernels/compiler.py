"""Builds C sources with the machine's compiler, for the machine's own CPU, and keeps the results.

A result's name holds a hash of the sources, the compiler, the flags and the CPU, so a stale or foreign one is never
loaded; it appears by a rename, so threads and processes may build at once. The ranks of a model want the same results at
the same time: one builds a source, the others wait for it. OpenMP is used with GCC only: its
runtime is the one that torch brings, and two runtimes would fight over the cores.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

COMPILERS = ("gcc", "cc", "clang")
BASE_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
NATIVE_FLAG = "-march=native"
OPENMP_FLAG = "-fopenmp"
BUILD_SECONDS = 120

logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """There is no compiler, or it refused every set of flags."""


def build(source: Path, cache_dir: Path) -> Path:
    """The shared library of a C source, from `cache_dir` or built into it. BuildError, OSError."""
    compiler, version = find_compiler()
    name = f"{source.stem}-{_fingerprint(source, version)}.so"
    _make_private(cache_dir)
    library = cache_dir / name
    if not library.exists():
        with _alone(cache_dir / f"{source.stem}.lock"):
            if not library.exists():
                logger.info("compiling %s for this CPU, once", source.name)
                _compile(compiler, flag_sets(version), source, library)
    return library


def find_compiler() -> tuple[str, str]:
    """Path and version text of the first compiler that answers."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        answer = subprocess.run((path, "--version"), capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if answer.returncode == 0:
            return path, answer.stdout
    raise BuildError("no C compiler found (gcc, cc or clang)")


def flag_sets(version: str) -> list[tuple[str, ...]]:
    """Flags to try, the fastest code first."""
    extras: list[tuple[str, ...]] = [(NATIVE_FLAG,), ()]
    if "clang" in version:
        return extras
    return [(*extra, OPENMP_FLAG) for extra in extras] + extras


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One thread of one process at a time, where the file system can say so."""
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flag_sets: list[tuple[str, ...]], source: Path, library: Path) -> None:
    message = ""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as directory:
        built = Path(directory, "library.so")
        for flags in flag_sets:
            command = (compiler, *BASE_FLAGS, *flags, "-o", str(built), str(source), "-lm")
            answer = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if answer.returncode == 0:
                built.replace(library)
                return
            message = message or _errors(answer.stderr)
    raise BuildError(f"{compiler} failed on {source.name}: {message}")


def _errors(output: str) -> str:
    """What of a compiler's output says that it failed, not what it warns of."""
    lines = output.splitlines()
    return "\n".join([line for line in lines if "error" in line] or lines)[:500]


def _fingerprint(source: Path, version: str) -> str:
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((version, BASE_FLAGS, NATIVE_FLAG, OPENMP_FLAG, _cpu())).encode())
    return digest.hexdigest()[:24]


def _cpu() -> tuple[str, ...]:
    """What "native" means here: the architecture, and the CPU's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    return (platform.machine(), *sorted({line for line in lines if line.startswith(wanted)}))


def _make_private(directory: Path) -> None:
    """Code is loaded from here: no other user may be able to put any there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{directory} belongs to another user or is writable by others")
