"""The catalogue: an operator is a public function whose body is the torch reference, and the versions that may run in
its place.

    @operator
    def rms_norm(x_TF, weight_F, eps): ...          # the contract, and the reference

    @rms_norm.version("c", takes=_can_run)
    def rms_norm_c(x_TF, weight_F, eps): ...        # the same result, faster where `takes` says yes

A call runs the first version that takes its operands, else the reference; `--kernel-backend torch` allows the reference
alone. Versions stand in the order of preference.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from .backend import is_reference_forced
from .graph import NotRecordable, recording

P = ParamSpec("P")
R = TypeVar("R")
WhyNot = Callable[[torch.device, torch.dtype], str]
REFERENCE, C = "torch", "c"

_operators: dict[str, "Operator[..., Any]"] = {}


@dataclass(frozen=True)
class Version(Generic[P, R]):
    """One implementation. `takes` looks at device, types and shapes of a call, and whether the code can be had.

    `why_not` says why nothing is taken on a device, in a type of the model; it is empty where something is.
    """

    name: str
    function: Callable[P, R]
    takes: Callable[P, bool]
    why_not: WhyNot


class Operator(Generic[P, R]):
    """Called like the function that it was made from."""

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.versions: list[Version[P, R]] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the version that `select` names."""
        return self.select(*args, **kwargs)(*args, **kwargs)

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        """The function that runs for these operands. NotRecordable where a graph records and it is not C."""
        is_recording = recording() is not None
        if not is_reference_forced():
            for version in self.versions:
                if (not is_recording or version.name == C) and version.takes(*args, **kwargs):
                    return version.function
        if is_recording:
            raise NotRecordable(f"{self.name} has no C version for its operands here")
        return self.reference

    def version(
        self, name: str, takes: Callable[P, bool], why_not: WhyNot = lambda device, dtype: ""
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function; its docstring says what it takes."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.versions.append(Version(name, function, takes, why_not))
            return function

        return register


def operator(reference: Callable[P, R]) -> Operator[P, R]:
    """Put a function into the catalogue."""
    made = Operator(reference)
    if made.name in _operators:
        raise ValueError(f"two operators are named {made.name}")
    _operators[made.name] = made
    return made


def known_operators() -> Iterator["Operator[..., Any]"]:
    """Every operator of the modules that are imported, by name."""
    return iter(sorted(_operators.values(), key=lambda known: known.name))
