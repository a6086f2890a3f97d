"""How a child process starts and how it dies with its parent.

The parent starts `python -m millstream.common.process MODULE:FUNCTION NAME` and writes a ChildConfig to its standard
input, which then stays open: end-of-file there means that the parent is gone (or wants the child to go). The kernel's
parent-death signal is a second line. A child that fails leaves its cause in the run directory, for the last line that
the server prints.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from .config import ChildConfig, child_environment
from .logs import set_up_logging
from .run_dir import hold_run_dir, leave_run_dir

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PARENT_DIED = signal.SIGUSR1
EXIT_PARENT_DIED = 0
LEAVE_SECONDS = 0.5  # for the last locks of the boot to go

logger = logging.getLogger(__name__)


def start_child(entry: str, config: ChildConfig, pass_fds: tuple[int, ...] = ()) -> "subprocess.Popen[bytes]":
    """Start a child at "module:function". Call from the main thread: the death signal follows the starting thread.

    Its `stdin` must stay open as long as the child shall live.
    """
    command = [sys.executable, "-P", "-m", "millstream.common.process", entry, config.name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment(), pass_fds=pass_fds)
    body = msgspec.msgpack.encode(config)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever watches it will say so
        child.stdin.write(len(body).to_bytes(4, "little") + body)
        child.stdin.flush()
    return child


def read_cause(run_dir: Path, name: str) -> str | None:
    """The one-line cause that a failed child left, if any."""
    try:
        return (run_dir / f"{name}.cause").read_text().strip() or None
    except OSError:
        return None


def main(argv: list[str]) -> NoReturn:
    """The child's side: read the config, arm the parent's death, run the process function, leave nothing behind."""
    entry, name = argv
    parent = os.getppid()
    _prctl(PR_SET_NAME, f"ms:{name}"[:15].encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C and SIGTERM mean
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = msgspec.msgpack.decode(_read_config(), type=ChildConfig)
    run_dir = Path(config.run_dir)
    try:
        lock = hold_run_dir(run_dir)
    except FileNotFoundError:  # the server has ended meanwhile
        os._exit(EXIT_PARENT_DIED)
    leave = _leave_on_parent_death(parent, run_dir, lock)
    set_up_logging(config.args.log_level, name)
    try:
        module_name, function_name = entry.split(":")
        run: Callable[[ChildConfig], Any] = getattr(importlib.import_module(module_name), function_name)
        run(config)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must learn of it
        _write_cause(run_dir, name, error)
        traceback.print_exc()
        leave(1)
    leave(0)


def signal_at_parent_death(number: signal.Signals, parent: int) -> None:
    """Have the kernel send this process a signal when its parent ends; it is sent now if that has ended already."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _read_config() -> bytes:
    size = int.from_bytes(_read_exactly(4), "little")
    return _read_exactly(size)


def _read_exactly(size: int) -> bytes:
    body = b""
    while len(body) < size:
        piece = os.read(0, size - len(body))
        if not piece:
            os._exit(EXIT_PARENT_DIED)
        body += piece
    return body


def _leave_on_parent_death(parent: int, run_dir: Path, lock: int) -> Callable[[int], NoReturn]:
    """End this process, without a word, on end-of-file at stdin or on the kernel's signal. Returns how it ends."""
    once = threading.Lock()

    def leave(code: int, wait_seconds: float = 0.0) -> NoReturn:
        once.acquire()  # never released: whoever comes first cleans up and ends the process
        leave_run_dir(run_dir, lock, wait_seconds)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=leave, args=(EXIT_PARENT_DIED, LEAVE_SECONDS), name="leave", daemon=True).start()

    def wait_for_eof() -> None:
        while os.read(0, 1):
            pass
        leave(EXIT_PARENT_DIED, LEAVE_SECONDS)

    signal.signal(PARENT_DIED, on_signal)
    _prctl(PR_SET_PDEATHSIG, PARENT_DIED)
    if os.getppid() != parent:
        leave(EXIT_PARENT_DIED)
    threading.Thread(target=wait_for_eof, name="parent-watch", daemon=True).start()
    return leave


def _write_cause(run_dir: Path, name: str, error: BaseException) -> None:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        (run_dir / f"{name}.cause").write_text(line[:1000])
    except OSError:
        logger.warning("could not leave the cause in %s", run_dir)


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
