"""Graphs of C operators: their memory, what they refuse, and how their threads work together."""

import ctypes
import random
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.kernels import graph as graphs
from millstream.kernels.activation import silu_and_mul
from millstream.kernels.backend import configure, set_backend
from millstream.kernels.graph import ALIGNMENT, Arena, Node, NotRecordable, record
from millstream.kernels.native import OperatorError, new_empty, run_nodes
from millstream.kernels.rms_norm import add_rms_norm, rms_norm

ARENA_BYTES = 4096
OPERATORS = """
#include "cpu_team.h"
typedef struct { int64_t *hits; int64_t count, near, fail_on; } args;
int take_all(const args *a, team *t) {
    for (int round = 0; round < 3; round++) {
        for (int64_t i; (i = a->near ? next_near_item(t, a->count) : next_item(t)) >= 0 && i < a->count;)
            __atomic_add_fetch(&a->hits[i], 1, __ATOMIC_RELAXED);
        team_barrier(t);
    }
    return t->thread == t->num_threads - 1 ? (int)a->fail_on : 0;
}
"""


class TakeArgs(ctypes.Structure):
    """args of OPERATORS."""

    _fields_ = (
        ("hits", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "near", "fail_on")),
    )


def gaps(held: list[torch.Tensor]) -> list[int]:
    """Free bytes between neighbours."""
    spans = sorted((x.data_ptr(), x.data_ptr() + len(x)) for x in held)
    return [start - end for (_, end), (start, _) in pairwise(spans)]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 1500), st.booleans()), max_size=40), st.randoms(use_true_random=False))
def test_blocks_of_the_arena_never_overlap_and_all_come_back(
    steps: list[tuple[int, bool]], choose: random.Random
) -> None:
    arena = Arena(ARENA_BYTES)
    held: list[torch.Tensor] = []
    for num_bytes, frees in steps:
        if frees and held:
            held.pop(choose.randrange(len(held)))
            continue
        try:
            held.append(arena.new_empty((num_bytes,), torch.uint8))
        except MemoryError:
            assert not any(gap >= num_bytes + ALIGNMENT for gap in gaps(held)), "a gap was large enough"
            continue
        spans = sorted((x.data_ptr(), x.data_ptr() + len(x)) for x in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
    held.clear()
    assert len(arena.new_empty((ARENA_BYTES,), torch.uint8)) == ARENA_BYTES


def test_a_view_keeps_its_block_and_a_borrowed_tensor_does_not() -> None:
    arena = Arena(ARENA_BYTES)
    whole = arena.new_empty((8, 64), torch.float32)
    view, borrowed = whole[2:4], arena.borrow(whole)
    address = whole.data_ptr()
    del whole
    assert arena.new_empty((8, 64), torch.float32).data_ptr() != address
    del view
    again = arena.new_empty((8, 64), torch.float32)
    assert again.data_ptr() == address == borrowed.data_ptr()
    again.fill_(7.0)
    assert borrowed.shape == (8, 64)
    assert bool((borrowed == 7.0).all())


@pytest.mark.usefixtures("c_compiler")
def test_a_graph_runs_again_on_new_inputs_with_reused_memory() -> None:
    arena = Arena(2**16)
    x, residual, weight = torch.empty(5, 64), torch.empty(5, 64), torch.rand(64)
    with record(arena) as graph:
        out = x
        for _ in range(20):  # 20 x 5 x 64 floats would not fit at once
            out = add_rms_norm(out, residual, weight, 1e-5)
        result = arena.borrow(out)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(5, 64))
        residual.copy_(torch.randn(5, 64))
        expected, expected_residual = x.clone(), residual.clone()
        for _ in range(20):
            expected = add_rms_norm.reference(expected, expected_residual, weight, 1e-5)
        run_nodes(graph.nodes())
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(residual, expected_residual)


def test_what_has_no_c_version_is_not_recorded() -> None:
    with pytest.raises(NotRecordable, match="silu_and_mul"), record(Arena(ARENA_BYTES)):
        silu_and_mul(torch.randn(2, 8, dtype=torch.float16))
    set_backend("torch")
    with pytest.raises(NotRecordable, match="rms_norm"), record(Arena(ARENA_BYTES)):
        rms_norm(torch.randn(2, 8), torch.ones(8), 1e-5)
    assert graphs.recording() is None


def test_a_graph_does_not_record_within_another() -> None:
    with record(Arena(ARENA_BYTES)), pytest.raises(RuntimeError, match="already"), record(Arena(ARENA_BYTES)):
        pass


@pytest.fixture(scope="module")
def take_all(c_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The address of OPERATORS' function."""
    folder = tmp_path_factory.mktemp("operators")
    source, library = folder / "take.c", folder / "take.so"
    source.write_text(OPERATORS)
    include = Path(graphs.__file__).parent
    subprocess.run([c_compiler, "-O2", "-shared", "-fPIC", f"-I{include}", "-o", library, source], check=True)
    address = ctypes.cast(ctypes.CDLL(str(library)).take_all, ctypes.c_void_p).value
    assert address is not None
    return address


@pytest.mark.parametrize("near", [0, 1])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_every_item_of_every_phase_goes_to_one_thread(take_all: int, num_threads: int, near: int) -> None:
    torch.set_num_threads(num_threads)
    for count in (0, 1, 2, 5, 1000):
        hits = torch.zeros(max(count, 1), dtype=torch.int64)
        steps = [TakeArgs(hits.data_ptr(), count, near, 0) for _ in range(4)]
        run_nodes((Node * 4)(*(Node(take_all, ctypes.addressof(args)) for args in steps)))
        assert Counter(hits[:count].tolist()) == ({3 * 4: count} if count else {})


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_failure_ends_the_graph_and_keeps_its_code(take_all: int, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    hits = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    codes = (0, 17, 23, 0)
    steps = [TakeArgs(x.data_ptr(), 1, 0, code) for x, code in zip(hits, codes, strict=True)]
    for _ in range(50):
        with pytest.raises(OperatorError) as caught:
            run_nodes((Node * 4)(*(Node(take_all, ctypes.addressof(args)) for args in steps)))
        assert caught.value.code == 17
    assert [int(x) for x in hits] == [150, 150, 0, 0]


@pytest.mark.usefixtures("c_compiler")
def test_a_graph_needs_no_openmp(kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.kernels.compiler.OPENMP_FLAG", "-fno-openmp")
    configure("auto", tmp_path)
    torch.set_num_threads(4)
    x, weight = torch.randn(9, 32), torch.rand(32)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


def test_scratch_that_is_too_large_for_the_machine_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="float32"):
        new_empty((2**20, 2**30), torch.float32)
