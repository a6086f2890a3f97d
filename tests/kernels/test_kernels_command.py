"""`millstream kernels` says what runs here, on machines with and without a compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream.kernels.catalogue import REFERENCE, known_operators
from millstream.tp_worker.kernels_command import main


@pytest.fixture(autouse=True)
def built_before(kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds what this session has built."""
    (tmp_path / "millstream").symlink_to(kernel_cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What --json prints."""
    assert main(["--json", *argv]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def runs(report: dict[str, Any]) -> dict[str, str]:
    return {operator["name"]: operator["runs"] for operator in report["operators"]}


def failing_compiler(directory: Path, compiler: str, source: str) -> Path:
    """A folder with a gcc that refuses one source, and is `compiler` for the others."""
    directory.mkdir()
    script = (
        f'#!/bin/sh\ncase "$*" in *{source}*) echo "{source}: no such luck" >&2; exit 1;; esac\nexec {compiler} "$@"\n'
    )
    (directory / "gcc").write_text(script)
    (directory / "gcc").chmod(0o755)
    return directory


@pytest.mark.usefixtures("c_compiler")
def test_json_has_every_operator_with_its_versions(capsys: pytest.CaptureFixture[str]) -> None:
    report = json_of(capsys, "--dtype", "bfloat16", "--device", "cpu")
    assert list(runs(report)) == [known.name for known in known_operators()]
    assert REFERENCE not in runs(report).values()
    assert report["operators"][0]["versions"][-1] == {
        "name": "torch",
        "takes": "everything else: the reference",
        "why_not": "",
    }
    assert (report["device"], report["dtype"], report["kernel_backend"]) == ("cpu", "bfloat16", "auto")
    assert "-march=native" in report["compiler"]
    assert {form["name"]: form["is_used"] for form in report["weight_formats"]} == dict.fromkeys(
        ("dense", "int4", "int8", "w8a8"), True
    )


@pytest.mark.usefixtures("c_compiler")
def test_the_table_names_every_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dtype", "bfloat16", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bfloat16 on cpu, --kernel-backend auto"
    assert sum(line.split()[0] == "torch" for line in lines if line) == len(list(known_operators()))
    assert [line for line in lines if line.split()[:4] == ["rms_norm", "c", "c", "bf16"]]
    assert [line for line in lines if line.startswith("int4 ") and "rows" not in line and "up to" in line]


def test_the_backend_torch_is_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    report = json_of(capsys, "--kernel-backend", "torch")
    assert set(runs(report).values()) == {REFERENCE}
    assert [form["name"] for form in report["weight_formats"] if form["is_used"]] == ["dense"]


def test_a_source_that_does_not_build_is_named_once_with_the_compilers_words(
    c_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = failing_compiler(tmp_path / "bin", c_compiler, "cpu_linear_f32.c")
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    report = json_of(capsys, "--dtype", "float32", "--device", "cpu")
    fallen = {name for name, version in runs(report).items() if version == REFERENCE}
    assert fallen == {"linear_dense", "linear_int4", "linear_int8", "linear_w8a8"}
    assert main(["--dtype", "float32", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("no such luck") == 1
    assert printed.out.count("not here: see [1]") == 4
    assert not printed.err


def test_it_runs_where_there_is_no_compiler() -> None:
    command = [sys.executable, "-m", "millstream", "kernels", "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "compiler: no C compiler found (gcc, cc or clang)"
    assert "not here: no C compiler found (gcc, cc or clang)" in done.stdout
    assert not done.stderr


def test_a_wrong_command_line_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dtyp", "float32"]) == 2
    assert capsys.readouterr().err == "millstream kernels: error: unknown argument --dtyp; did you mean --dtype?\n"
