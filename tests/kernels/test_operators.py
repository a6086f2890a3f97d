"""What the catalogue says of itself is what runs."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from millstream.kernels import compiler, operators
from millstream.kernels.backend import configure, set_backend
from millstream.kernels.catalogue import REFERENCE, known_operators
from millstream.kernels.operators import OperatorReport, describe_operators
from tests.kernels.operator_cases import CASES

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
KNOWN = {known.name: known for known in known_operators()}
for path in Path(__file__).parent.glob("*_cases.py"):
    importlib.import_module(f"{__package__}.{path.stem}")


def modules_with_operators() -> set[str]:
    """Names of the files of kernels/ that put something into the catalogue."""
    trees = {path.stem: ast.parse(path.read_text()) for path in Path(operators.__file__).parent.glob("*.py")}
    functions = ((name, node) for name, tree in trees.items() for node in ast.walk(tree))
    return {
        name
        for name, node in functions
        if isinstance(node, ast.FunctionDef) and "operator" in map(ast.unparse, node.decorator_list)
    }


@pytest.mark.source_tree
def test_importing_the_catalogue_imports_every_operator() -> None:
    imported = {name for name, value in vars(operators).items() if inspect.ismodule(value)}
    assert modules_with_operators()
    assert modules_with_operators() <= imported


def selected(name: str, dtype: torch.dtype) -> Iterator[str]:
    """The versions that run for the cases of an operator."""
    names = {version.function: version.name for version in KNOWN[name].versions}
    for case_dtype, _, operands in CASES[name].calls():
        if case_dtype == dtype:
            yield names.get(KNOWN[name].select(*operands.args, **operands.kwargs), REFERENCE)


def check_reports(dtype: torch.dtype) -> dict[str, OperatorReport]:
    """What is said to run does run for a case, where there are cases in this type."""
    reports = {report.name: report for report in describe_operators(CPU, dtype)}
    assert set(reports) == set(KNOWN)
    for name, report in reports.items():
        assert dtype not in CASES[name].dtypes or report.runs in selected(name, dtype), name
    return reports


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_version_that_is_said_to_run_runs(dtype: torch.dtype) -> None:
    reports = check_reports(dtype)
    assert {name for name, report in reports.items() if report.runs == REFERENCE} == set()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler_it_says_why_c_does_not_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    configure("auto")
    for report in check_reports(dtype).values():
        reasons = {version.name: version.why_not for version in report.versions}
        assert reasons["c"] == "no C compiler found (gcc, cc or clang)"
        assert report.runs != "c"


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_backend_torch_it_names_the_flag(dtype: torch.dtype) -> None:
    set_backend("torch")
    for report in check_reports(dtype).values():
        assert report.runs == REFERENCE
        assert {version.why_not for version in report.versions} == {"--kernel-backend torch", ""}


@pytest.mark.usefixtures("c_compiler")
def test_a_type_or_device_without_c_code_is_named() -> None:
    half = {report.name: report for report in describe_operators(CPU, torch.float16)}
    assert half["rms_norm"].versions[0].why_not == "there is no C code for torch.float16"
    assert half["sample"].runs == "c"
    cuda = {report.name: report for report in describe_operators(torch.device("cuda"), torch.bfloat16)}
    assert {report.runs for report in cuda.values()} == {REFERENCE}
    assert cuda["sample"].versions[0].why_not == "C runs on the CPU"


def test_every_version_says_what_it_takes_and_every_operator_what_it_gives() -> None:
    for report in describe_operators(CPU, torch.float32):
        assert report.contract
        assert all(version.takes for version in report.versions)
        assert [version.name for version in report.versions][-1] == REFERENCE
