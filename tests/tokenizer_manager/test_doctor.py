"""`millstream doctor`: what it finds on this machine, and on others."""

import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.tokenizer_manager.commands import doctor_checks, doctor_packages
from millstream.tokenizer_manager.commands.doctor_checks import CHECKS, Subject, Verdict, check_all, check_variables
from millstream.tokenizer_manager.commands.doctor_command import main
from millstream.tokenizer_manager.commands.doctor_packages import as_numbers, check_packages, requirements, torch_build


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def finding(name: str, subject: Subject) -> tuple[Verdict, str, str]:
    return next((each.verdict, each.text, each.fix) for each in check_all(subject) if each.name == name)


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    assert main(["--port", str(free_port), "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(found) == list(CHECKS)
    assert {each["verdict"] for each in found.values()} <= {"ok", "warn"}
    assert not [each for each in found.values() if each["verdict"] == "ok" and each["fix"]]
    assert "smollm2" in found["model"]["text"].lower()


def test_every_finding_that_is_not_ok_says_what_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["/nowhere", "--port", str(port)]) == 1
        lines = capsys.readouterr().out.splitlines()
        bad = [index for index, line in enumerate(lines) if line.startswith(("warn", "fail"))]
        assert all("-> " in lines[index + 1] for index in bad)
        text = "\n".join(lines)
        assert f"port {port} on 127.0.0.1 is taken by process {os.getpid()} (" in text
        assert "fail  model" in text


def test_gpus_without_a_driver_or_a_build_for_them_are_named(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    subject = Subject(root=tmp_path)
    assert finding("gpu", subject)[:2] == (Verdict.WARN, "1 of NVIDIA's, but no driver")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 570.1\nGCC\n")
    assert finding("gpu", subject)[:2] == (Verdict.OK, "1 of NVIDIA's; NVRM version: 570.1")
    _, cuda = torch_build()
    assert finding("torch", subject)[0] is (Verdict.OK if cuda else Verdict.WARN)


@pytest.mark.parametrize(
    ("free_kib", "verdict"), [(300 * 1024, Verdict.FAIL), (1024 * 1024, Verdict.WARN), (8 * 1024**2, Verdict.OK)]
)
def test_memory_is_judged_by_what_is_free(tmp_path: Path, free_kib: int, verdict: Verdict) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {free_kib} kB\n")
    assert finding("memory", Subject(root=tmp_path))[0] is verdict


def test_a_check_that_cannot_look_is_a_failure_and_not_the_end(tmp_path: Path) -> None:
    verdict, text, fix = finding("memory", Subject(root=tmp_path))
    assert (verdict, bool(text), bool(fix)) == (Verdict.FAIL, True, True)


@pytest.mark.usefixtures("file_limit")
@pytest.mark.parametrize(("files", "verdict"), [(200, Verdict.FAIL), (1024, Verdict.WARN), (4096, Verdict.OK)])
def test_the_limit_of_open_files_is_judged(files: int, verdict: Verdict) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    found, text, fix = finding("limits", Subject())
    assert (found, f"{files:,}" in text) == (verdict, True)
    assert fix.startswith("ulimit -n ") or verdict is Verdict.OK


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    verdict, text, fix = finding("cache", Subject())
    assert (verdict, "Not a directory" in text, "XDG_CACHE_HOME" in fix) == (Verdict.WARN, True, True)


def test_variables_are_looked_at() -> None:
    assert check_variables({"MILLSTREAM_PORT": "tcp://1.2.3.4:5"})[0] is Verdict.WARN
    assert check_variables({"MILLSTREAM_PORT": "8000"}) == (Verdict.OK, "MILLSTREAM_* variables set: port", "")


def test_packages_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wrong = check_packages()
    assert not wrong
    assert {"aiohttp", "torch", "transformers"} <= set(found)
    assert not [name for name in requirements() if name in {"pytest", "triton", "matplotlib"}]
    monkeypatch.setattr(doctor_packages, "requirements", lambda: {"aiohttp": "999", "no-such-package": ""})
    found, wrong = check_packages()
    assert wrong == [f"aiohttp {found['aiohttp']} is older than 999", "no-such-package is missing"]
    assert doctor_checks._packages(Subject())[0] is Verdict.FAIL


def test_versions_compare_as_numbers() -> None:
    assert as_numbers("2.13.0+cpu") == (2, 13, 0)
    assert as_numbers("2.9") < as_numbers("2.11.0")
    assert as_numbers("x") == ()
