"""The servers that are measured: how each is started, when it is ready, what its processes cost, how it is stopped."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parent.parent.parent
SERVE_PEER = ROOT / "tests" / "bench" / "peers" / "serve.sh"
START_SECONDS = 900  # vLLM's first one compiles
STOP_SECONDS = 30
POLL_SECONDS = 0.05
LOG_BYTES = 2000  # of a server that did not start
OURS = {"ours": (), "ours-w8a8": ("--quantization", "w8a8")}
PEERS = ("llama", "vllm")
NAMES = (*OURS, *PEERS)


class Slots(NamedTuple):
    """What llama.cpp must be told at its start: requests at once, and tokens of each."""

    num_requests: int
    num_tokens: int


class RunningServer:
    """A server that is ready."""

    def __init__(self, name: str, port: int, process: "subprocess.Popen[bytes]", start_seconds: float) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.start_seconds = start_seconds
        self._process = psutil.Process(process.pid)

    @property
    def is_ours(self) -> bool:
        """Whether it is millstream."""
        return self.name in OURS

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each process so far (/proc/PID/stat, user and system), by name; of a peer's all in one."""
        seconds: dict[str, float] = {}
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                name = "main" if process == self._process else (process.cmdline() or ["?"])[-1]
                name, times = name if self.is_ours else "all", process.cpu_times()
                seconds[name] = seconds.get(name, 0.0) + times.user + times.system
        return seconds


@contextmanager
def running(name: str, slots: Slots, flags: tuple[str, ...] = ()) -> Iterator[RunningServer]:
    """Start a server (`flags` are for ours alone), wait until it is ready, and stop it with all its processes."""
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            _command(name, port, slots, flags),
            env=environment() if name in OURS else None,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}/{'readyz' if name in OURS else 'health'}"
            while not _answers(url):
                if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                    raise SystemExit(
                        f"{name} did not start (for a peer: tests/bench/peers/setup.sh)\n{_tail(log.fileno())}"
                    )
                time.sleep(POLL_SECONDS)
            yield RunningServer(name, port, process, time.monotonic() - began)
        finally:
            _stop(process)


def environment() -> dict[str, str]:
    """Of our own processes: this tree's package, and its tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".pkg"), str(ROOT)])}


def _command(name: str, port: int, slots: Slots, flags: tuple[str, ...]) -> list[str]:
    if name in OURS:
        return [sys.executable, "-m", "millstream", "serve", "smollm2", "--port", str(port), *OURS[name], *flags]
    return [str(SERVE_PEER), name, str(port), *map(str, slots)]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end; what is left of its session after a while is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        for _ in range(int(STOP_SECONDS / POLL_SECONDS)):
            os.killpg(process.pid, 0)
            time.sleep(POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace")
