"""The registry of random calls that test every operator of the catalogue; the calls are in this folder's *_cases.py.

    @cases("rms_norm", num_seeds=20)
    def rms_norm_case(draw: Draw) -> Call:
        return call(draw.randn(draw.shapes.choice((0, 1, 7)), 64), draw.randn(64), 1e-5)

test_catalogue.py then compares every version of rms_norm with the reference on these calls, for each type and seed, at
once and inside a recorded graph that is replayed with other contents; an operator without cases fails it, and so does a
version that takes no call of one of the types (`only` names the types of a version that is not for all of them). A seed
must give the same call every time: each version gets a fresh one. Sizes come from `draw.shapes` (and `draw.seed`, to
walk through every edge), everything else from `draw.values` and `draw.randn`, so that two contents of a seed have the
same shapes. Results and operands, which may be changed in place, are compared.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator

import torch

Tolerances = dict[torch.dtype, tuple[float, float]]  # absolute, relative
ROUNDING: Tolerances = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2)}


class Draw:
    """Where a case takes its numbers from."""

    def __init__(self, dtype: torch.dtype, seed: int, content: int = 0) -> None:
        self.dtype = dtype
        self.seed = seed
        self.shapes = random.Random(seed)
        self.values = random.Random(f"{seed} {content}")
        self.generator = torch.Generator().manual_seed(2 * seed + content)

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal numbers in the case's type."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """Operands of one call."""

    args: tuple[object, ...]
    kwargs: dict[str, object]


def call(*args: object, **kwargs: object) -> Call:
    """The operands as a Call."""
    return Call(args, kwargs)


@dataclasses.dataclass(frozen=True)
class Cases:
    """How the calls of one operator are drawn, and how near its versions are to the reference."""

    make: Callable[[Draw], Call]
    num_seeds: int
    dtypes: tuple[torch.dtype, ...]
    tolerances: Tolerances
    only: dict[str, tuple[torch.dtype, ...]] = dataclasses.field(default_factory=dict)  # by version

    def calls(self, every: int = 1) -> Iterator[tuple[torch.dtype, int, Call]]:
        """Every so many calls, with their types and seeds."""
        for dtype in self.dtypes:
            for seed in range(0, self.num_seeds, every):
                yield dtype, seed, self.make(Draw(dtype, seed))


CASES: dict[str, Cases] = {}


def cases(
    operator: str,
    *,
    num_seeds: int = 12,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    tolerances: Tolerances = ROUNDING,
    only: dict[str, tuple[torch.dtype, ...]] | None = None,
) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Register the decorated function as the cases of an operator. `tolerances` holds each of `dtypes`, `only` the types of a version."""

    def register(make: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        assert operator not in CASES, f"two sets of cases for {operator}"
        CASES[operator] = Cases(make, num_seeds, dtypes, tolerances, only or {})
        return make

    return register


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors of operands or results, those in tuples, Calls, caches and weights too."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []  # oneDNN's form is opaque
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    if dataclasses.is_dataclass(value):
        return tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
    return []
