"""Distributions of a workload: lengths of prompts and outputs, gaps between arrivals, popularity of prefixes."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LONGEST = 10**6
SYNTAX = "N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEAN:SIGMA"
NUM_PARAMETERS = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2}
ARRIVALS = ("poisson", "constant", "gamma", "closed")


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of whole numbers from 1 up. `sigma` of a lognormal is that of the logarithm."""

    kind: str
    parameters: tuple[float, ...]

    def sample(self, rng: np.random.Generator, count: int) -> Int64Array:
        """`count` lengths."""
        first, last = self.parameters[0], self.parameters[-1]
        match self.kind:
            case "uniform":
                return rng.integers(int(first), int(last), count, endpoint=True)
            case "exponential":
                drawn = rng.exponential(first, count)
            case "lognormal":
                drawn = rng.lognormal(math.log(first) - last**2 / 2, last, count)
            case _:
                drawn = np.full(count, first)
        return np.clip(np.rint(drawn), 1, LONGEST).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """`256`, `uniform:128:512`, `exponential:256` or `lognormal:256:0.8`; ValueError says what is wrong."""
    kind, *rest = text.split(":")
    if not rest:
        kind, rest = "fixed", [kind]
    try:
        values = tuple(float(each) for each in rest)
    except ValueError:
        values = ()
    if len(values) != NUM_PARAMETERS.get(kind):
        raise ValueError(f"must be {SYNTAX}, not {text!r}")
    lengths = values[:1] if kind in {"exponential", "lognormal"} else values
    if not all(1 <= value <= LONGEST for value in lengths):
        raise ValueError(f"lengths must be from 1 to {LONGEST}, not {text!r}")
    if kind in {"fixed", "uniform"} and any(value != int(value) for value in values):
        raise ValueError(f"lengths must be whole numbers, not {text!r}")
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"LOW must not exceed HIGH in {text!r}")
    if kind == "lognormal" and not 0 <= values[1] <= 5:
        raise ValueError(f"SIGMA must be from 0 to 5 in {text!r}")
    return Lengths(kind, values)


def arrival_times(kind: str, rate: float, cv: float, count: int, rng: np.random.Generator) -> FloatArray:
    """`count` times in seconds, `rate` a second on average; `cv` (deviation over mean of the gaps) is for gamma."""
    match kind:
        case "poisson":
            gaps = rng.exponential(1 / rate, count)
        case "gamma":
            shape = 1 / cv**2
            gaps = rng.gamma(shape, 1 / (rate * shape), count)
        case _:
            gaps = np.full(count, 1 / rate)
    return np.cumsum(gaps)


def zipf_choices(num_items: int, exponent: float, count: int, rng: np.random.Generator) -> Int64Array:
    """Items 0 .. num_items-1, item k with a weight of 1 / (k + 1) ** exponent."""
    weights = 1.0 / np.arange(1, num_items + 1) ** exponent
    return np.asarray(rng.choice(num_items, count, p=weights / weights.sum()))
