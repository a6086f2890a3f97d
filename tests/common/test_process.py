"""A child process: what it is told, and that it dies with its parent and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millstream.common import process as process_module
from millstream.common.config import ChildConfig, ServerArgs, child_environment
from millstream.common.process import read_cause, start_child
from millstream.common.run_dir import create_run_dir, leave_run_dir

DEADLINE = 10.0

CHILDREN = """
import os, time
from pathlib import Path

def report(config):
    Path(config.run_dir, "told").write_text(f"{config.name} {config.rank} {config.args.tp_size} {os.getppid()}")
    Path(config.run_dir, "told").rename(Path(config.run_dir, "report"))
    time.sleep(60)

def fail(config):
    raise ValueError("the weights\\nare missing")
"""

PARENT = """
import sys, time
from pathlib import Path
from millstream.common.config import ChildConfig, ServerArgs
from millstream.common.process import start_child
config = ChildConfig(name="child", rank=0, run_dir=sys.argv[1], instance_id=1, args=ServerArgs(model_path="m"))
child = start_child("test_children:report", config)
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    (tmp_path / "test_children.py").write_text(CHILDREN)
    monkeypatch.setattr("millstream.common.run_dir.temporary_dir", lambda: tmp_path)
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    monkeypatch.setattr(process_module, "child_environment", lambda: environment)
    run_dir, lock = create_run_dir()
    yield run_dir, lock
    if run_dir.exists():
        leave_run_dir(run_dir, lock)


def config(run_dir: Path) -> ChildConfig:
    return ChildConfig(
        name="child", rank=3, run_dir=str(run_dir), instance_id=1, args=ServerArgs(model_path="m", tp_size=4)
    )


def test_a_child_gets_its_config_and_ends_when_its_input_closes(boot: tuple[Path, int]) -> None:
    run_dir, _ = boot
    with start_child("test_children:report", config(run_dir)) as child:
        wait_until((run_dir / "report").exists)
        assert (run_dir / "report").read_text() == f"child 3 4 {os.getpid()}"
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE) == 0
    assert run_dir.exists()  # we still hold it


def test_a_child_that_fails_leaves_its_cause_in_one_line(boot: tuple[Path, int]) -> None:
    run_dir, _ = boot
    with start_child("test_children:fail", config(run_dir)) as child:
        assert child.wait(DEADLINE) == 1
    assert read_cause(run_dir, "child") == "ValueError: the weights are missing"
    assert read_cause(run_dir, "other") is None


def test_a_child_ignores_the_signals_that_are_the_main_process_s_to_judge(boot: tuple[Path, int]) -> None:
    run_dir, _ = boot
    with start_child("test_children:report", config(run_dir)) as child:
        wait_until((run_dir / "report").exists)
        for number in (signal.SIGTERM, signal.SIGINT):
            child.send_signal(number)
        time.sleep(0.2)
        assert child.poll() is None
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE) == 0


def test_when_the_parent_is_killed_the_child_dies_and_removes_the_directory(boot: tuple[Path, int]) -> None:
    run_dir, lock = boot
    environment = process_module.child_environment()
    command = [sys.executable, "-P", "-c", PARENT, str(run_dir)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until((run_dir / "report").exists)
        os.close(lock)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        wait_until(lambda: not run_dir.exists())
