"""Every version of every operator against its reference, on the CPU's own instructions and on older ones.

operator_cases.py says how an operator comes in here; none can stay out.
"""

import contextlib
import dataclasses
import importlib
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from millstream.kernels import catalogue, compiler
from millstream.kernels.backend import configure, prepare, set_backend
from millstream.kernels.catalogue import Operator, Version, known_operators
from millstream.kernels.graph import Arena, record
from millstream.kernels.kv_cache import KVCache
from millstream.kernels.linear_w8a8 import W8A8Weight, block_size
from millstream.kernels.native import run_nodes
from tests.kernels.operator_cases import CASES, ROUNDING, Call, Cases, Draw, call, tensors_in

AnyOperator = Operator[..., object]
AnyVersion = Version[..., object]
for directory, package in (
    (Path(catalogue.__file__).parent, "millstream.kernels"),
    (Path(__file__).parent, __package__),
):
    for path in directory.glob("*.py" if package != __package__ else "*_cases.py"):
        importlib.import_module(f"{package}.{path.stem}")

OPERATORS = {known.name: known for known in known_operators()}
VERSIONS = {
    f"{known.name}-{version.name}": (known, version) for known in OPERATORS.values() for version in known.versions
}
RECORDED_VERSIONS = [name for name in VERSIONS if name.endswith("-c")]
BASELINES = ("x86-64", "x86-64-v3", "x86-64-v4") if platform.machine() == "x86_64" else ("armv8-a",)
FEATURES = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
ARENA_BYTES = 64 << 20
FEWER_SEEDS = 3  # every so many, where a version has been tested on all
THREADED_SEEDS = 4  # every so many; threads that other processes keep waiting are slow


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """C operators run on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def without_cases(operators: Iterable[AnyOperator]) -> set[str]:
    """Names of the operators that have none."""
    return {known.name for known in operators} - set(CASES)


def assert_same(actual: object, expected: object, tolerance: tuple[float, float], where: str) -> None:
    """Results or operands agree, NaN with NaN."""
    absolute, relative = tolerance
    pairs = zip(tensors_in(actual), tensors_in(expected), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(
            x, y, atol=absolute, rtol=relative, equal_nan=True, msg=lambda message: f"{where}: {message}"
        )


def check_version(known: AnyOperator, version: AnyVersion, cases: Cases, every: int = 1) -> None:
    """The version agrees with the reference on each call that it takes, and takes some of each type that it is for."""
    taken = set()
    for dtype, seed, operands in cases.calls(every):
        if not version.takes(*operands.args, **operands.kwargs):
            continue
        taken.add(dtype)
        expected_operands = cases.make(Draw(dtype, seed))
        expected = known.reference(*expected_operands.args, **expected_operands.kwargs)
        with threads(2 if seed % THREADED_SEEDS == 0 else 1):
            actual = version.function(*operands.args, **operands.kwargs)
        where = f"{known.name} {version.name} {dtype} seed {seed}"
        assert_same((actual, operands), (expected, expected_operands), cases.tolerances[dtype], where)
    meant = set(cases.only.get(version.name, cases.dtypes))
    assert taken == meant, f"{known.name} {version.name} takes cases of {taken}, and is for {meant}"


def check_recorded(known: AnyOperator, version: AnyVersion, cases: Cases) -> None:
    """Recorded once, replayed on two contents: each time what the reference gives."""
    for dtype, seed, operands in cases.calls(FEWER_SEEDS):
        if not version.takes(*operands.args, **operands.kwargs):
            continue
        with threads(2), record(Arena(ARENA_BYTES)) as graph:
            actual = version.function(*operands.args, **operands.kwargs)
        for content in (0, 1):
            expected_operands = cases.make(Draw(dtype, seed, content))
            for x, y in zip(tensors_in(operands), tensors_in(expected_operands), strict=True):
                x.copy_(y)
            with threads(2 if seed % THREADED_SEEDS == 0 else 1):
                run_nodes(graph.nodes())
            expected = known.reference(*expected_operands.args, **expected_operands.kwargs)
            where = f"{known.name} {version.name} recorded, {dtype} seed {seed} content {content}"
            assert_same((actual, operands), (expected, expected_operands), cases.tolerances[dtype], where)


def test_every_operator_has_cases_and_every_case_an_operator() -> None:
    assert len(OPERATORS) > 8
    assert without_cases(OPERATORS.values()) == set()
    assert set(CASES) <= set(OPERATORS)


@pytest.mark.parametrize("name", ["decode_attention", "extend_attention"])
def test_the_cases_of_attention_reach_every_edge(name: str) -> None:
    groups, head_dims, edges = set(), set(), set()
    for _, _, operands in CASES[name].calls():
        q, cache, kv_lens = operands.args[0], operands.args[1], operands.args[-1]
        assert isinstance(q, torch.Tensor)
        assert isinstance(cache, KVCache)
        assert isinstance(kv_lens, torch.Tensor)
        groups.add(q.shape[1] // cache.num_kv_heads)
        head_dims.add(cache.head_dim)
        lens, size = set(kv_lens.tolist()), cache.page_size
        edges.add("no request" if not lens else "no token" if not q.shape[0] else "tokens")
        edges |= {"one token"} if 1 in lens else set()
        edges |= {"exact page"} if size > 1 and size in lens else set()
        edges |= {"one over"} if size > 1 and size + 1 in lens else set()
        edges |= {"empty row"} if 0 in lens else set()
    assert groups == set(range(1, 9))
    assert head_dims >= {64, 80, 96, 112, 128, 192, 256}
    assert edges >= {"no request", "one token", "exact page", "one over", "empty row"}


@pytest.mark.parametrize("every", [1, FEWER_SEEDS])
def test_the_cases_of_w8a8_reach_every_block_that_is_rotated(every: int) -> None:
    weights = [operands.args[1] for _, _, operands in CASES["linear_w8a8"].calls(every)]
    sizes = {block_size(weight.in_features) for weight in weights if isinstance(weight, W8A8Weight)}
    assert sizes == {4, 8, 16, 32, 64}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_agrees_with_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    if name in RECORDED_VERSIONS:
        request.getfixturevalue("c_compiler")
    known, version = VERSIONS[name]
    check_version(known, version, CASES[known.name])


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("name", RECORDED_VERSIONS)
def test_a_version_agrees_when_it_is_recorded_and_replayed(name: str) -> None:
    known, version = VERSIONS[name]
    check_recorded(known, version, CASES[known.name])


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("baseline", BASELINES)
def test_c_versions_agree_on_older_cpus(baseline: str, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if FEATURES.get(baseline, "") not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU does not run {baseline}")
    monkeypatch.setattr(compiler, "NATIVE_FLAG", f"-march={baseline}")
    monkeypatch.setattr(compiler, "BASE_FLAGS", ("-O1", "-std=gnu11", "-shared", "-fPIC"))
    configure("auto", kernel_cache)
    for dtype in (torch.float32, torch.bfloat16):
        prepare(dtype)
    for name in RECORDED_VERSIONS:
        known, version = VERSIONS[name]
        check_version(known, version, CASES[known.name], FEWER_SEEDS)


def test_the_backend_torch_runs_the_reference_alone() -> None:
    set_backend("torch")
    for name, known in OPERATORS.items():
        operands = CASES[name].make(Draw(CASES[name].dtypes[0], 1))
        assert known.select(*operands.args, **operands.kwargs) is known.reference


class TestTheChecks:
    """They fail where they must."""

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def operator_with(self, function: Callable[..., object], takes: bool = True) -> tuple[AnyOperator, AnyVersion]:
        known: AnyOperator = Operator(self.double)
        known.version("c", takes=lambda *_, **__: takes)(function)
        return known, known.versions[0]

    def cases_of(self, make: Callable[[Draw], Call]) -> Cases:
        return Cases(make, 3, (torch.float32,), ROUNDING)

    @pytest.fixture
    def doubles(self) -> Cases:
        return self.cases_of(lambda draw: call(draw.randn(3)))

    def test_an_operator_without_cases_is_found(self) -> None:
        assert without_cases([Operator(self.double)]) == {"double"}

    def test_a_right_version_passes(self, doubles: Cases) -> None:
        check_version(*self.operator_with(lambda x: x + x), doubles)

    def test_a_wrong_result_fails(self, doubles: Cases) -> None:
        with pytest.raises(AssertionError, match=r"double c torch\.float32 seed 0"):
            check_version(*self.operator_with(lambda x: x * 2.001), doubles)

    def test_a_changed_operand_fails(self, doubles: Cases) -> None:
        with pytest.raises(AssertionError, match="seed 0"):
            check_version(*self.operator_with(lambda x: x.mul_(2)), doubles)

    def test_a_version_that_takes_no_case_fails(self, doubles: Cases) -> None:
        with pytest.raises(AssertionError, match=r"takes cases of set\(\)"):
            check_version(*self.operator_with(lambda x: x * 2, takes=False), doubles)

    def test_a_version_that_takes_one_type_of_two_fails_unless_it_is_for_that_one(self, doubles: Cases) -> None:
        known: AnyOperator = Operator(self.double)
        known.version("c", takes=lambda x: x.dtype == torch.float32)(self.double)
        both = dataclasses.replace(doubles, dtypes=(torch.float32, torch.bfloat16))
        with pytest.raises(AssertionError, match="is for"):
            check_version(known, known.versions[0], both)
        check_version(known, known.versions[0], dataclasses.replace(both, only={"c": (torch.float32,)}))

    @pytest.mark.usefixtures("c_compiler")
    def test_a_version_that_looks_at_contents_while_it_records_fails(self, doubles: Cases) -> None:
        with pytest.raises(AssertionError, match="content 1"):
            check_recorded(*self.operator_with(self.double), doubles)
