"""Calls of C operators (cpu_team.h says how they run), now or into the graph that records.

A C version takes its operands as they lie: what would have to be copied or converted, its `takes` refuses.
"""

import ctypes
from collections.abc import Sequence

import torch

from .backend import NATIVE_SUFFIXES, build_error, find_function, function_name, load_library
from .catalogue import WhyNot
from .graph import Node, recording

POINTER, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class OperatorError(RuntimeError):
    """A C operator gave up; `code` is its own."""

    def __init__(self, code: int, name: str = "a C operator") -> None:
        super().__init__(f"{name} failed with code {code}")
        self.code = code


def find_typed(family: str, name: str, x: torch.Tensor) -> int | None:
    """The C function `name` for x's type, of the source `family`_<type>.c; None where x's device or type has none."""
    suffix = NATIVE_SUFFIXES.get(x.dtype)
    if suffix is None or x.device.type != "cpu":
        return None
    return find_function(f"{family}_{suffix}.c", f"{name}_{suffix}")


def needs_code(source: str) -> WhyNot:
    """`why_not` of a C version: `source` is a file, or a family with one for each type."""

    def why_not(device: torch.device, dtype: torch.dtype) -> str:
        if device.type != "cpu":
            return "C runs on the CPU"
        suffix = NATIVE_SUFFIXES.get(dtype)
        if suffix is None and not source.endswith(".c"):
            return f"there is no C code for {dtype}"
        files = (source if source.endswith(".c") else f"{source}_{suffix}.c", "cpu_graph.c")
        return next((build_error(file) for file in files if load_library(file) is None), "")

    return why_not


def launch(function: int | None, args: ctypes.Structure) -> None:
    """Run a C operator on all of torch's threads, or note it down. OperatorError where it fails."""
    assert function is not None, "`takes` has found it"
    graph = recording()
    if graph is not None:
        graph.add(function, args)
    else:
        run_nodes((Node * 1)(Node(function, ctypes.addressof(args))))


def run_nodes(nodes: "ctypes.Array[Node]") -> None:
    """Run operators one after the other. OperatorError where one fails."""
    runner = find_function("cpu_graph.c", "run_graph")
    assert runner is not None, "a C operator was found without the runner"
    failure = _RUN_GRAPH(runner)(nodes, len(nodes), torch.get_num_threads())
    if failure:
        index, code = failure >> 32, failure & 0xFFFFFFFF
        raise OperatorError(code, function_name(nodes[index].operator))


def new_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory for an operator's result or scratch, of the graph that records or torch's.

    MemoryError where there is none.
    """
    graph = recording()
    if graph is not None:
        return graph.arena.new_empty(shape, dtype)
    try:
        return torch.empty(*shape, dtype=dtype)
    except RuntimeError as error:
        raise MemoryError(f"no memory for a tensor {tuple(shape)} of {dtype}") from error


def are_heads_adjacent(x_THD: torch.Tensor) -> bool:
    """Whether a token's heads lie behind each other; tokens may be apart."""
    return x_THD.stride()[1:] == (x_THD.shape[2], 1)


def is_int32_table(x: torch.Tensor) -> bool:
    """Whether C reads x as rows of int32: its rows may be apart."""
    return x.dtype == torch.int32 and x.device.type == "cpu" and (x.shape[-1] <= 1 or x.stride(-1) == 1)


_RUN_GRAPH = ctypes.CFUNCTYPE(INT64, POINTER, INT64, INT64)
