"""Where a recorded step's time goes, operator by operator: the recorded list runs with a time stamp between any two."""

import ctypes
import itertools
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.kernels import backend
from millstream.kernels.compiler import build
from millstream.kernels.graph import Graph, Node
from millstream.kernels.native import run_nodes
from tests.bench.floor import ATTENTION, LINEAR, OTHER

STAMP_SOURCE = Path(__file__).with_name("stamp.c")
TYPE_SUFFIX = re.compile("_(bf16|f32)$")
FORMAT_OF = {"linear_dense": "bf16", "linear_int4": "int4", "linear_int8": "int8", "linear_w8a8": "w8a8"}


class OperatorTime(NamedTuple):
    """One call in a step; `seconds` is the median over the runs."""

    name: str
    seconds: float

    @property
    def kind(self) -> str:
        """linear, attention or other."""
        if self.name in FORMAT_OF:
            return LINEAR
        return ATTENTION if "attention" in self.name else OTHER


def time_operators(graph: Graph, num_runs: int) -> list[OperatorTime]:
    """Each call of the step in order."""
    with tempfile.TemporaryDirectory() as directory:
        library = ctypes.CDLL(str(build(STAMP_SOURCE, Path(directory))))
    nodes = graph.nodes()
    times = (ctypes.c_int64 * (len(nodes) + 1))()
    slots = (ctypes.c_void_p * (len(nodes) + 1))(*(ctypes.addressof(times) + 8 * i for i in range(len(nodes) + 1)))
    stamped = (Node * (2 * len(nodes) + 1))(*_with_stamps(nodes, library, slots))
    run_nodes(stamped)
    runs = []
    for _ in range(num_runs):
        run_nodes(stamped)
        runs.append([(after - before) / 1e9 for before, after in itertools.pairwise(times)])
    names = _names_of_functions()
    medians = map(statistics.median, zip(*runs, strict=True))
    return [OperatorTime(names[node.operator], seconds) for node, seconds in zip(nodes, medians, strict=True)]


def formats_of(times: Sequence[OperatorTime]) -> tuple[str, str]:
    """How the weights that ran are stored: of the layers, and of the logits, whose product is the last one."""
    linear = [FORMAT_OF[each.name] for each in times if each.kind == LINEAR]
    return statistics.mode(linear[:-1]), linear[-1]


def _with_stamps(
    nodes: "ctypes.Array[Node]", library: ctypes.CDLL, slots: "ctypes.Array[ctypes.c_void_p]"
) -> Iterator[Node]:
    stamp = ctypes.cast(library.stamp, ctypes.c_void_p).value
    for i in range(len(slots)):
        yield Node(stamp, ctypes.addressof(slots) + 8 * i)
        if i < len(nodes):
            yield nodes[i]


def _names_of_functions() -> dict[int, str]:
    """Address -> operator, of the C functions that were found so far."""
    found = backend._choice.functions.items()
    return {address: TYPE_SUFFIX.sub("", symbol) for (_, symbol), address in found if address is not None}
