"""How many prompt tokens a step may compute: `--chunked-prefill-size` off, fixed, or `auto`.

`auto` learns what a step costs, seconds = base + per_prefill * prompt tokens + per_decode * decode rows, by recursive
least squares on relative errors, with forgetting (Plackett 1950; Ljung, System Identification, chapter 11), and fills a
step up to a target time. While streams run the target is a multiple of what the step costs without any prompt, so their
inter-token latency stays within that multiple; it rises with the number of waiters to each stream, which all gain from
a larger step, and with the age of the oldest, so a queue drains. While no stream runs only the next arrival has to wait
for the step, and the target is larger. Reads no clock: seconds come in.
"""

import math

from ..common.config import AUTO_CHUNK
from .scheduler_config import SchedulerConfig

FIRST_CHUNK = 512  # until enough steps were seen
MAX_CHUNK = 8192
MIN_LEARNT_STEPS = 4  # with prompt tokens; beside streams one will do, and so many with decode rows

STREAM_MULTIPLE = 4.0  # of a step without prompts, while streams run
MAX_STREAM_MULTIPLE = 8.0  # when the oldest waiter has waited RAISE_SECONDS
RAISE_SECONDS = 10.0
MIN_STREAM_SECONDS = 0.02  # nobody reads faster than that
MAX_STREAM_SECONDS = 0.5  # but a step with prompts is never held under twice a step without
NO_STREAM_SECONDS = 0.5

FORGETTING = 0.95  # a step counts half after 14 more
MIN_INFORMATION = 0.1  # what forgetting leaves: steps of one kind do not make the others forgotten
MAX_SURPRISE = 4.0  # a step that took less than this part of what was expected counts as this part: errors are relative
SCALE = (1.0, 32.0, 8.0)  # makes base, prompt tokens and decode rows numbers of one size

Vector = list[float]


class StepCost:
    """The cost model: seconds of a step, fitted online. Nonsense in (zero, infinite, negative) is ignored."""

    def __init__(self) -> None:
        self._weights: Vector = [0.0, 0.0, 0.0]
        self._information: list[Vector] = [[0.0] * 3 for _ in range(3)]  # sum of inputs x inputs, forgotten slowly
        self._num_steps = 0

    def seconds(self, num_prefill_tokens: int, num_decodes: int) -> float:
        """What a step is expected to cost; never negative."""
        inputs = _inputs(num_prefill_tokens, num_decodes)
        return sum(weight * value for weight, value in zip(self._weights, inputs, strict=True))

    @property
    def seconds_per_prefill_token(self) -> float:
        """What one more prompt token costs; not positive while that is not known."""
        return self._weights[1] / SCALE[1]

    def learn(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """One step of the recursion."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        expected = self.seconds(num_prefill_tokens, num_decodes)
        self._num_steps += 1
        if self._num_steps > 2 * MIN_LEARNT_STEPS and expected > 0:
            seconds = max(seconds, expected / MAX_SURPRISE)
        inputs = [value / seconds for value in _inputs(num_prefill_tokens, num_decodes)]  # errors count relatively
        error = 1 - sum(w * x for w, x in zip(self._weights, inputs, strict=True))
        old = self._information
        self._information = [[FORGETTING * old[i][j] + inputs[i] * inputs[j] for j in range(3)] for i in range(3)]
        gain = _solve(self._information, inputs)
        self._weights = [max(0.0, w + g * error) for w, g in zip(self._weights, gain, strict=True)]


class ChunkSize:
    """The prompt tokens of the next step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._fixed = config.chunked_prefill_size
        self._page_size = config.page_size
        self._cost = StepCost()
        self._num_prefill_steps = 0
        self._num_decode_steps = 0

    @property
    def is_auto(self) -> bool:
        """Whether the steps decide."""
        return self._fixed == AUTO_CHUNK

    def on_step(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many prompt tokens and decode rows took `seconds` on the workers."""
        if not self.is_auto:
            return
        self._num_prefill_steps += num_prefill_tokens > 0
        self._num_decode_steps += num_decodes > 0
        self._cost.learn(num_prefill_tokens, num_decodes, seconds)

    def tokens(self, num_decodes: int, num_waiting: int, oldest_waiting_seconds: float) -> int | None:
        """What a step beside `num_decodes` decode rows may compute, while `num_waiting` requests wait; None: whole prompts.

        A fixed size counts the decode rows in, as SGLang's does; an automatic one is prompt tokens alone, whole pages
        from one page to MAX_CHUNK.
        """
        if not self.is_auto:
            return self._fixed if self._fixed > 0 else None
        if not self._has_learnt(num_decodes):
            return self._whole_pages(FIRST_CHUNK)
        without_prompts = self._cost.seconds(0, num_decodes)
        target = NO_STREAM_SECONDS
        if num_decodes:
            target = _target_seconds(without_prompts, num_waiting / num_decodes, oldest_waiting_seconds)
        num_tokens = (target - without_prompts) / self._cost.seconds_per_prefill_token
        return self._whole_pages(min(num_tokens, MAX_CHUNK))

    def _has_learnt(self, num_decodes: int) -> bool:
        if self._cost.seconds_per_prefill_token <= 0:
            return False
        return (self._num_decode_steps if num_decodes else self._num_prefill_steps) >= MIN_LEARNT_STEPS

    def _whole_pages(self, num_tokens: float) -> int:
        return max(1, int(num_tokens / self._page_size + 0.5)) * self._page_size


def _target_seconds(without_prompts: float, waiters_per_stream: float, oldest_waiting_seconds: float) -> float:
    """How long a step with streams may take."""
    share = min(max(oldest_waiting_seconds / RAISE_SECONDS, 0.0), 1.0)
    multiple = STREAM_MULTIPLE + (MAX_STREAM_MULTIPLE - STREAM_MULTIPLE) * share
    multiple *= 1 + waiters_per_stream
    target = min(max(multiple * without_prompts, MIN_STREAM_SECONDS), MAX_STREAM_SECONDS)
    return max(target, 2 * without_prompts)


def _solve(information: list[Vector], inputs: Vector) -> Vector:
    """(information + MIN_INFORMATION * identity)^-1 inputs, by the cofactors of a symmetric 3 x 3 matrix."""
    (a, b, c), (_, d, e), (_, _, f) = information
    a, d, f = a + MIN_INFORMATION, d + MIN_INFORMATION, f + MIN_INFORMATION
    x, y, z = inputs
    first, second, third = d * f - e * e, c * e - b * f, b * e - c * d
    determinant = a * first + b * second + c * third
    return [
        (first * x + second * y + third * z) / determinant,
        (second * x + (a * f - c * c) * y + (b * c - a * e) * z) / determinant,
        (third * x + (b * c - a * e) * y + (a * d - b * b) * z) / determinant,
    ]


def _inputs(num_prefill_tokens: int, num_decodes: int) -> Vector:
    return [1.0, num_prefill_tokens / SCALE[1], num_decodes / SCALE[2]]
