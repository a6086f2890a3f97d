"""The private directory of one boot: its sockets live there, and every process of the boot holds a lock in it.

The lock (flock, shared) is how anyone can tell whether a boot is still alive: the last process to let go removes the
directory, and a new boot sweeps those that nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from .config import temporary_dir

PREFIX = "millstream-"
LOCK_NAME = "lock"
RETRY_SECONDS = 0.002


def create_run_dir() -> tuple[Path, int]:
    """Make a fresh 0700 directory, after sweeping those of dead boots; returns it and the descriptor that holds it.

    The lock file gets its name only when it is held, so that no other boot's sweep can take the directory for dead.
    """
    base = temporary_dir()
    sweep_dead_run_dirs(base)
    run_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    unnamed = run_dir / "lock.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    unnamed.rename(run_dir / LOCK_NAME)
    return run_dir, lock


def hold_run_dir(run_dir: Path) -> int:
    """Take this process's share of the lock; returns the descriptor that keeps it."""
    lock = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def leave_run_dir(run_dir: Path, lock: int, wait_seconds: float = 0.0) -> None:
    """Let go of the lock, and remove the directory if no other process holds it. Never raises.

    A process that is dying lets go of its pipes a little before its locks, so whoever noticed its death waits for them.
    """
    deadline = time.monotonic() + wait_seconds
    while not _is_last_holder(lock):  # a failed try has let go of our own share
        if time.monotonic() >= deadline or not run_dir.exists():
            os.close(lock)
            return
        time.sleep(RETRY_SECONDS)
    shutil.rmtree(run_dir, ignore_errors=True)
    os.close(lock)


def sweep_dead_run_dirs(base: Path) -> None:
    """Remove our own run directories in `base` that no process holds."""
    for run_dir in base.glob(PREFIX + "*"):
        try:
            if run_dir.is_symlink() or run_dir.stat().st_uid != os.getuid():
                continue
            lock = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        leave_run_dir(run_dir, lock)


def _is_last_holder(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
