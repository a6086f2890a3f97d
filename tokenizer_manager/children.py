"""The child processes of a server: started in order, watched through pidfds, ended together."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..common.config import ChildConfig, ServerArgs
from ..common.flags import without_secrets
from ..common.links import DETOKENIZER, SCHEDULER, worker_name
from ..common.process import read_cause, start_child

STOP_SECONDS = 1.0
POLL_SECONDS = 0.005


class Entries(msgspec.Struct, frozen=True):
    """The "module:function" of each kind of child."""

    scheduler: str = "millstream.scheduler.process:run"
    tp_worker: str = "millstream.tp_worker.process:run"
    detokenizer: str = "millstream.detokenizer.process:run"


class Children:
    """All child processes of one boot."""

    def __init__(self, args: ServerArgs, run_dir: Path, instance_id: int, entries: Entries, keeps_dense: bool) -> None:
        self._args = without_secrets(args)
        self._keeps_dense = keeps_dense
        self._run_dir = run_dir
        self._instance_id = instance_id
        self._entries = entries
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}

    def start(self) -> None:
        """Start every child; the ranks come first, since they take longest to be ready."""
        memory = os.memfd_create("millstream-tp") if self._args.tp_size > 1 else -1
        for rank in range(self._args.tp_size):
            self._start(self._entries.tp_worker, worker_name(rank), rank, memory)
        self._start(self._entries.detokenizer, DETOKENIZER)
        self._start(self._entries.scheduler, SCHEDULER)
        if memory >= 0:
            os.close(memory)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with the cause as soon as any child ends."""
        loop = asyncio.get_running_loop()
        for name, process in self._processes.items():
            pidfd = os.pidfd_open(process.pid)
            self._pidfds[name] = pidfd
            loop.add_reader(pidfd, self._on_exit, name, on_death)

    async def stop(self) -> None:
        """End every child: close its standard input, then SIGKILL what is left after a second; reaps all."""
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        await self._reap(time.monotonic() + STOP_SECONDS)

    def _start(self, entry: str, name: str, rank: int = 0, memory: int = -1) -> None:
        config = ChildConfig(
            name=name,
            rank=rank,
            run_dir=str(self._run_dir),
            instance_id=self._instance_id,
            args=self._args,
            shared_memory_fd=memory,
            keeps_dense=self._keeps_dense,
        )
        self._processes[name] = start_child(entry, config, pass_fds=(memory,) if memory >= 0 else ())

    async def _reap(self, deadline: float) -> None:
        """Without a thread: while an interpreter ends, none can be started."""
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self._processes.values()):
                break
            await asyncio.sleep(POLL_SECONDS)
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _on_exit(self, name: str, on_death: Callable[[str], None]) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfds[name])
        code = self._processes[name].wait()
        on_death(describe_exit(name, code, read_cause(self._run_dir, name)))


def describe_exit(name: str, code: int, cause: str | None) -> str:
    """One line on why a child ended, from its exit code and the cause that it left."""
    if code < 0:
        try:
            return f"{name} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"{name} was killed by signal {-code}"
    return f"{name} failed: {cause}" if cause else f"{name} ended with exit code {code}"
