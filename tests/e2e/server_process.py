"""A real server in a process of its own, for end-to-end tests: start, wait, talk, stop, and look for leftovers."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import requests

import millstream

PACKAGE_PARENT = Path(next(iter(millstream.__path__))).parent
ROOT = Path(__file__).parent.parent.parent
READY_SECONDS = 3 * 8.0
EXACT_FLAGS = ("--dtype", "float32", "--quantization", "none")
PATIENCE_SECONDS = 90.0  # where a start-up is not what is tested: the machine may be busy


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until the condition holds; AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.1f} s: {what}"
        time.sleep(0.01)


def make_directory() -> Path:
    """A directory whose path is short enough for sockets."""
    return Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))


def environment() -> dict[str, str]:
    """Of a process that imports the package under test and the tests."""
    paths = os.pathsep.join([str(PACKAGE_PARENT), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def millstream(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `millstream ARGS` to its end."""
    command = [sys.executable, "-P", "-m", "millstream", *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


class ServerProcess:
    """`millstream serve ARGS` with a temporary directory of its own.

    `site` is a folder whose sitecustomize.py all its processes run first.
    """

    def __init__(
        self,
        *args: str,
        program: tuple[str, ...] = ("-m", "millstream", "serve"),
        directory: Path | None = None,
        site: Path | None = None,
    ) -> None:
        self.directory = directory or make_directory()
        self.log_path = self.directory / "log"
        self.shared_memory_before = {path.name for path in Path("/dev/shm").iterdir()}
        self.environment = {**environment(), "TMPDIR": str(self.directory)}
        if site is not None:
            self.environment["PYTHONPATH"] = f"{site}{os.pathsep}{self.environment['PYTHONPATH']}"
        command = [sys.executable, "-P", *program, "--port", "0", *args]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
            )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line printed."""
        return self.log.rstrip().rpartition("\n")[2]

    @property
    def url(self) -> str:
        """The base URL, known as soon as the plan is printed."""
        wait_until(lambda: bool(self._find_url()) or self.process.poll() is not None, PATIENCE_SECONDS, "a URL")
        url = self._find_url()
        assert url, self.log
        return url

    def wait_until_ready(self, seconds: float = PATIENCE_SECONDS) -> "ServerProcess":
        """Wait for /readyz; AssertionError with the log if the server ends or is late."""
        url = self.url

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):
                return requests.get(url + "/readyz", timeout=5).status_code == 200
            return False

        wait_until(is_ready, seconds, "ready")
        self.remember_processes()
        return self

    def remember_processes(self) -> dict[int, psutil.Process]:
        """All processes of the server seen so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        return self.seen

    def child(self, name: str) -> psutil.Process:
        """The child process of that name ("scheduler", "tp_worker.0", ...); waits for it to appear."""
        found: list[psutil.Process] = []

        def look() -> bool:
            for process in self.remember_processes().values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.cmdline()[-1:] == [name]:
                        found.append(process)
                        return True
            return False

        wait_until(look, PATIENCE_SECONDS, f"a child {name}")
        return found[0]

    def post(self, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
        """POST a JSON body."""
        return requests.post(self.url + path, json=body, timeout=options.pop("timeout", 120), **options)

    def complete(self, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
        """A plain /v1/completions; AssertionError on any status but 200."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = requests.get(self.url + "/metrics", timeout=10).text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        """Send a signal, wait for the end, check that nothing is left; returns the exit code."""
        self.remember_processes()
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 20) -> int:
        """Wait for the end and check that nothing is left; returns the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {seconds} s:\n{self.log}") from None
        self.check_nothing_left()
        return code

    def check_nothing_left(self) -> None:
        """No process, no run directory, no shared-memory segment."""

        def all_gone() -> bool:
            return not any(process.is_running() and process.status() != "zombie" for process in self.seen.values())

        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(all_gone, 5, f"processes are left: {list(self.seen.values())}")
        wait_until(lambda: not list(self.directory.glob("millstream-*")), 5, "run directories are left")
        assert {path.name for path in Path("/dev/shm").iterdir()} <= self.shared_memory_before

    def kill(self) -> None:
        """End everything, whatever its state."""
        self.remember_processes()
        for process in [*self.seen.values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _find_url(self) -> str | None:
        found = re.search(r"http://[\w.\[\]:]+:\d+", self.log) if self.log_path.exists() else None
        return found[0] if found else None


@contextlib.contextmanager
def serving(
    *args: str, program: tuple[str, ...] = ("-m", "millstream", "serve"), site: Path | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready, killed at the end if it still runs."""
    server = ServerProcess(*args, program=program, site=site)
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()
