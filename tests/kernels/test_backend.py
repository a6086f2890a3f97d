"""How C versions are built, kept and given up."""

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from millstream.kernels import backend, compiler
from millstream.kernels.activation import silu_and_mul
from millstream.kernels.backend import (
    NATIVE_SUFFIXES,
    SOURCES,
    TYPED_SOURCES,
    build_error,
    configure,
    load_library,
    prepare,
    set_backend,
)
from millstream.kernels.compiler import BuildError, build, find_compiler

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(c_compiler: str, tmp_path: Path) -> Path:
    path = tmp_path / "source" / "answer.c"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_a_library_is_built_once_and_then_found(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    first = build(source, cache)
    written = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert build(source, cache) == first
    assert first.stat().st_mtime_ns == written
    assert list(cache.glob("*.so")) == [first]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_changed_source_header_or_flag_gets_another_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build(source, tmp_path / "cache")}
    source.write_text(SOURCE.replace("42", "43"))
    names.add(build(source, tmp_path / "cache"))
    source.with_name("other.h").write_text("/* a header */\n")
    names.add(build(source, tmp_path / "cache"))
    monkeypatch.setattr(compiler, "NATIVE_FLAG", "-mtune=generic")
    names.add(build(source, tmp_path / "cache"))
    assert len(names) == 4


def test_of_many_who_want_the_same_source_at_once_one_builds_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, cache = tmp_path / "compiled", tmp_path / "cache"
    script = f'#!/bin/sh\n[ "$1" = --version ] || {{ echo once >> {compiled}; sleep 0.2; }}\nexec {find_compiler()[0]} "$@"\n'
    (tmp_path / "gcc").write_text(script)
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build(source, cache), range(4)))
    assert [ctypes.CDLL(str(library)).answer() for library in libraries] == [42]
    assert set(cache.glob("*.so")) == libraries
    assert compiled.read_text() == "once\n"


def test_flags_that_the_compiler_does_not_know_are_left_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "NATIVE_FLAG", "-march=no-such-cpu")
    assert ctypes.CDLL(str(build(source, tmp_path / "cache"))).answer() == 42


def test_a_source_that_does_not_compile_says_so_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int early(void) { return late(); }\nnot C\n")
    with pytest.raises(BuildError, match="failed on answer") as raised:
        build(source, tmp_path / "cache")
    assert "error" in str(raised.value)
    assert "warning" not in str(raised.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["answer.lock"]


def test_a_directory_that_others_can_write_to_is_refused(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="writable"):
        build(source, cache)


def test_without_a_compiler_the_torch_versions_run_and_it_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    configure("auto")
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING):
        assert silu_and_mul.select(x) is silu_and_mul.reference
        assert torch.equal(silu_and_mul(x), silu_and_mul.reference(x))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text
    assert build_error("cpu_operators_f32.c") == "no C compiler found (gcc, cc or clang)"


@pytest.mark.usefixtures("c_compiler")
def test_what_a_type_needs_can_be_built_ahead(tmp_path: Path) -> None:
    configure("auto", tmp_path / "cache")
    prepare(torch.float32)
    built = {path.name.rsplit("-", 1)[0] for path in (tmp_path / "cache").glob("*.so")}
    assert built == {"cpu_operators_f32", "cpu_linear_f32", *(Path(source).stem for source in SOURCES)}


def test_every_c_source_is_built_ahead() -> None:
    sources = {path.name for path in Path(backend.__file__).parent.glob("*.c")}
    typed = {f"{family}_{suffix}.c" for family in TYPED_SOURCES for suffix in NATIVE_SUFFIXES.values()}
    assert sources == typed | set(SOURCES)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="triton-on-toast"):
        set_backend("triton-on-toast")  # type: ignore[arg-type]


@pytest.mark.usefixtures("c_compiler")
def test_c_and_torch_share_one_openmp_runtime() -> None:
    torch.set_num_threads(2)
    torch.randn(512, 512) @ torch.randn(512, 512)
    assert load_library("cpu_operators_f32.c") is not None
    assert load_library("cpu_operators_bf16.c") is not None
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    assert len([path for path in mapped if "libgomp" in Path(path).name or "libomp" in Path(path).name]) == 1
