"""Every C version against its torch reference, on the CPU's own instructions and on older ones."""

import platform
from functools import partial
from pathlib import Path

import pytest
import torch

from millstream.kernels import compiler
from millstream.kernels.backend import NATIVE_SUFFIXES, configure, operators_for, set_backend
from millstream.kernels.native import SIGNATURES, find_operator
from tests.kernels.operator_cases import CASES, Outputs

TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2)}
DTYPES = tuple(NATIVE_SUFFIXES)
BASELINES = ("x86-64", "x86-64-v3", "x86-64-v4") if platform.machine() == "x86_64" else ("armv8-a",)
FEATURES = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}


def outputs_of(name: str, dtype: torch.dtype, seed: int, backend: str) -> Outputs:
    set_backend("torch" if backend == "torch" else "auto")
    return CASES[name](dtype, seed)


def name_seed(seed: int, message: str) -> str:
    return f"seed {seed}: {message}"


def assert_versions_agree(name: str, dtype: torch.dtype, seeds: range) -> None:
    absolute, relative = TOLERANCES[dtype]
    for seed in seeds:
        native, reference = (outputs_of(name, dtype, seed, backend) for backend in ("auto", "torch"))
        for x, y in zip(native, reference, strict=True):
            torch.testing.assert_close(x, y, atol=absolute, rtol=relative, msg=partial(name_seed, seed))


def test_every_operator_with_a_c_version_has_a_case() -> None:
    assert set(CASES) == set(SIGNATURES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIGNATURES)
def test_where_there_is_a_compiler_the_c_version_runs(name: str, dtype: torch.dtype) -> None:
    compiler.find_compiler()
    assert find_operator(name, torch.empty(0, dtype=dtype)) is not None
    set_backend("torch")
    assert find_operator(name, torch.empty(0, dtype=dtype)) is None


def test_other_types_take_the_torch_version() -> None:
    assert operators_for(torch.empty(0, dtype=torch.float16)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_c_version_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    assert_versions_agree(name, dtype, range(40 if name == "paged_attention" else 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_c_version_agrees_on_older_cpus(
    baseline: str, dtype: torch.dtype, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if FEATURES.get(baseline, "") not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU does not run {baseline}")
    monkeypatch.setattr(compiler, "NATIVE_FLAG", f"-march={baseline}")
    monkeypatch.setattr(compiler, "BASE_FLAGS", ("-O1", "-std=gnu11", "-shared", "-fPIC"))
    configure("auto", kernel_cache)
    assert operators_for(torch.empty(0, dtype=dtype)) is not None
    for name in CASES:
        assert_versions_agree(name, dtype, range(12 if name == "paged_attention" else 6))
