"""The run directory: private, held, removed by the last one, swept when dead."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.common import run_dir as run_dir_module
from millstream.common.run_dir import create_run_dir, hold_run_dir, leave_run_dir


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_dir_module, "temporary_dir", lambda: tmp_path)
    return tmp_path


def test_it_is_private_to_the_user() -> None:
    assert stat.S_IMODE(create_run_dir()[0].stat().st_mode) == 0o700


def test_the_last_holder_removes_it() -> None:
    run_dir, first = create_run_dir()
    second = hold_run_dir(run_dir)
    leave_run_dir(run_dir, first)
    assert run_dir.exists()
    leave_run_dir(run_dir, second)
    assert not run_dir.exists()


def test_a_new_boot_sweeps_directories_of_dead_boots_and_spares_the_living() -> None:
    (living, living_lock), (dead, dead_lock) = create_run_dir(), create_run_dir()
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_SH); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(dead / "lock")], check=False)
    os.close(dead_lock)
    fresh, fresh_lock = create_run_dir()
    assert living.exists()
    assert fresh.exists()
    assert not dead.exists()
    os.close(living_lock)
    os.close(fresh_lock)


def test_a_link_with_our_name_is_not_followed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "lock").touch()
    (base / "millstream-link").symlink_to(elsewhere)
    create_run_dir()
    assert elsewhere.exists()
