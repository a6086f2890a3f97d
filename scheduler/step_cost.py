"""What steps cost the workers, learnt from those that ran: seconds in, no clock.

    without prompts    base + per_decode x decode rows
    with prompts       that, and  per_token x (prompt tokens + overhead_len) + per_pair x (query, key) pairs

A token at position p of its prompt makes p + 1 pairs, so late chunks of a long prompt cost more. Two fits, of steps
without prompts and of what steps with prompts took beyond those; each is non-negative least squares on relative errors
with forgetting (Ljung, System Identification, chapter 11; Lawson and Hanson, Solving Least Squares Problems, chapter
23). The second one's inputs are the corners of what is possible: whatever it learns, a token costs something, the
overhead is at most MAX_OVERHEAD_LEN tokens and attention costs as much as all else not before position
MIN_ATTENTION_LEN.
"""

import math
from typing import NamedTuple

MAX_OVERHEAD_LEN = 64
MIN_ATTENTION_LEN = 1000
DECODE_SCALE = 8  # makes base and decode rows numbers of one size
PREFILL_SCALE = 64

FORGETTING = 0.95  # a step counts half after 14 more
HOLD = 0.1  # holds what was known where all that told of it is forgotten
MAX_SURPRISE = 2.0  # a step counts as if it took at most so many times what was expected, and at least one of so many
NUM_FREE_STEPS = 8  # nothing is a surprise before
MIN_SCALE = 1e-6  # seconds: errors below are not told apart
SINGULAR = 1e-14  # what elimination leaves of a diagonal element is its rounding

Vector = list[float]


class StepWork(NamedTuple):
    """What a step computes."""

    num_prefill_tokens: int
    num_prefill_pairs: int
    num_decodes: int


class StepCost:
    """Nonsense in (zero, infinite, negative) is ignored."""

    def __init__(self) -> None:
        self._without_prompts = Fit(2)
        self._prompts = Fit(3)
        self._num_steps = 0

    def without_prompts(self, num_decodes: int) -> float:
        """Seconds of a step with decode rows alone."""
        return self._without_prompts.value(_decode_inputs(num_decodes))

    @property
    def per_token(self) -> float:
        """Seconds of one more prompt token; 0.0 while nothing is known."""
        return sum(self._prompts.weights) / PREFILL_SCALE

    @property
    def overhead(self) -> float:
        """Seconds that prompts cost beside their tokens."""
        return self._prompts.weights[1] / PREFILL_SCALE * MAX_OVERHEAD_LEN

    @property
    def per_pair(self) -> float:
        """Seconds of one more (query, key) pair."""
        return self._prompts.weights[2] / PREFILL_SCALE / MIN_ATTENTION_LEN

    def seconds(self, work: StepWork) -> float:
        """What a step is expected to cost; never negative."""
        seconds = self.without_prompts(work.num_decodes)
        return seconds + self._prompts.value(_prefill_inputs(work)) if work.num_prefill_tokens else seconds

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds`."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        scale, expected = seconds, self.seconds(work)
        self._num_steps += 1
        if self._num_steps > NUM_FREE_STEPS and expected > 0:
            scale, seconds = expected, min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        if work.num_prefill_tokens:
            beyond = seconds - self.without_prompts(work.num_decodes)
            self._prompts.learn(_prefill_inputs(work), beyond, max(scale, MIN_SCALE))
        else:
            self._without_prompts.learn(_decode_inputs(work.num_decodes), seconds, max(scale, MIN_SCALE))


class Fit:
    """value = weights x inputs, weights not negative, fitted to what was learnt; the latest counts most."""

    def __init__(self, num_inputs: int) -> None:
        self.weights: Vector = [0.0] * num_inputs
        self._information: list[Vector] = [[0.0] * num_inputs for _ in range(num_inputs)]  # sum of inputs x inputs
        self._evidence: Vector = [0.0] * num_inputs  # sum of inputs x value

    def value(self, inputs: Vector) -> float:
        """What these inputs give."""
        return sum(weight * each for weight, each in zip(self.weights, inputs, strict=True))

    def learn(self, inputs: Vector, value: float, scale: float) -> None:
        """These inputs gave `value`; the error counts in parts of `scale`."""
        inputs, value = [each / scale for each in inputs], value / scale
        for index, each in enumerate(inputs):
            row = self._information[index]
            row[:] = [FORGETTING * old + each * other for old, other in zip(row, inputs, strict=True)]
            self._evidence[index] = FORGETTING * self._evidence[index] + each * value
        self._solve()

    def _solve(self) -> None:
        """The best weights; those that would be negative, or cannot be told from others, are left out one by one."""
        indexes = list(range(len(self.weights)))
        known: dict[int, float] = {}
        while indexes:
            solution = _solve(
                [[self._information[row][column] + HOLD * (row == column) for column in indexes] for row in indexes],
                [self._evidence[index] + HOLD * self.weights[index] for index in indexes],
            )
            if isinstance(solution, int):
                del indexes[solution]
                continue
            if min(solution) >= 0:
                known = dict(zip(indexes, solution, strict=True))
                break
            del indexes[solution.index(min(solution))]
        self.weights = [known.get(index, 0.0) for index in range(len(self.weights))]


def count_pairs(start: int, end: int) -> int:
    """(query, key) pairs of the prompt tokens from `start` to `end`."""
    return (end * (end + 1) - start * (start + 1)) // 2


def _decode_inputs(num_decodes: int) -> Vector:
    return [1.0, num_decodes / DECODE_SCALE]


def _prefill_inputs(work: StepWork) -> Vector:
    num_tokens, num_pairs, _ = work
    corners = (num_tokens, num_tokens + MAX_OVERHEAD_LEN, num_tokens + num_pairs / MIN_ATTENTION_LEN)
    return [each / PREFILL_SCALE for each in corners]


def _solve(matrix: list[Vector], vector: Vector) -> Vector | int:
    """matrix^-1 vector by elimination; the matrix is positive definite but for rounding, so it needs no pivots.

    Where rounding is all that is left of a pivot, its index: that column depends on those before it.
    """
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for index, pivot in enumerate(rows):
        if pivot[index] <= SINGULAR * matrix[index][index]:
            return index
        for row in rows:
            if row is not pivot:
                factor = row[index] / pivot[index]
                row[:] = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    return [row[-1] / row[index] for index, row in enumerate(rows)]
