"""How many prompt tokens a step may compute: `--chunked-prefill-size` off, fixed, or `auto`.

`auto` learns what steps cost (step_cost.py), and fills a step with prompts up to a target time:

    while streams run    STREAM_MULTIPLE times a step without prompts, so that inter-token latency stays within that
                         multiple. The more requests wait behind the first for each stream, and the longer the oldest
                         has waited, the larger: they all gain from it, and a queue drains. MAX_STREAM_SECONDS at most
    otherwise            NO_STREAM_SECONDS: only the next arrival has to wait for the step

Tokens late in a long prompt cost more, and count more.
"""

import math
from typing import NamedTuple

from ..common.config import AUTO_CHUNK
from .scheduler_config import SchedulerConfig
from .step_cost import StepCost, StepWork

FIRST_CHUNK = 512  # until enough steps were seen
MIN_CHUNK, MIN_CHUNK_ALONE = 32, 128  # beside streams and without: fewer tokens cost more than a target is worth
MAX_CHUNK = 8192
MAX_GROWTH = 4  # times the largest that was seen
MIN_LEARNT_STEPS = 4  # with prompts; beside streams one will do, and so many without

STREAM_MULTIPLE = 3.5  # a fifth of them may still take half as long again before a latency is 5 times the usual
MAX_STREAM_MULTIPLE = 7.0  # when the oldest waiter has waited RAISE_SECONDS
RAISE_SECONDS = 10.0
WAITER_RAISE = 2.0  # for each request that waits behind the first to each stream
MIN_STREAM_SECONDS = 0.02  # nobody reads faster than that
MAX_STREAM_SECONDS = 0.25  # but a step with prompts is never held under twice a step without
NO_STREAM_SECONDS = 0.25


class ChunkBudget(NamedTuple):
    """The prompt tokens of a step. A token at position p of its prompt counts 1 + p / attention_len."""

    tokens: float
    attention_len: float = math.inf


class ChunkSize:
    """The prompt tokens of the next step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._fixed = config.chunked_prefill_size
        self._page_size = config.page_size
        self._cost = StepCost()
        self._num_prefill_steps = 0
        self._num_decode_steps = 0
        self._largest_chunk = 0

    @property
    def is_auto(self) -> bool:
        """Whether the steps decide."""
        return self._fixed == AUTO_CHUNK

    def on_step(self, work: StepWork, seconds: float) -> None:
        """A step with this work took `seconds` on the workers."""
        if not self.is_auto:
            return
        if work.num_prefill_tokens:
            self._num_prefill_steps += 1
            self._largest_chunk = max(self._largest_chunk, work.num_prefill_tokens)
        else:
            self._num_decode_steps += 1
        self._cost.learn(work, seconds)

    def budget(self, num_decodes: int, num_behind: int, oldest_waiting_seconds: float) -> ChunkBudget | None:
        """What a step beside `num_decodes` decode rows may compute while `num_behind` wait behind the first; None: all.

        A fixed size counts the decode rows in, as SGLang's does; an automatic one is prompt tokens alone: a page or
        MIN_CHUNK at least, and half a page more than would do, because chunks end where a page does.
        """
        if not self.is_auto:
            return ChunkBudget(self._fixed - num_decodes) if self._fixed > 0 else None
        if not self._has_learnt(num_decodes):
            return ChunkBudget(FIRST_CHUNK)
        cost = self._cost
        without_prompts = cost.without_prompts(num_decodes)
        target = NO_STREAM_SECONDS
        if num_decodes:
            target = _target_seconds(without_prompts, num_behind / num_decodes, oldest_waiting_seconds)
            target = max(target, without_prompts + 2 * cost.overhead)
        tokens = (target - without_prompts - cost.overhead) / cost.per_token + self._page_size / 2
        tokens = min(tokens, MAX_CHUNK, MAX_GROWTH * self._largest_chunk)
        attention_len = cost.per_token / cost.per_pair if cost.per_pair else math.inf
        least = max(self._page_size, MIN_CHUNK if num_decodes else MIN_CHUNK_ALONE)
        return ChunkBudget(max(tokens, least), attention_len)

    def _has_learnt(self, num_decodes: int) -> bool:
        if self._cost.per_token <= 0:
            return False
        return (self._num_decode_steps if num_decodes else self._num_prefill_steps) >= MIN_LEARNT_STEPS


def _target_seconds(without_prompts: float, behind_per_stream: float, oldest_waiting_seconds: float) -> float:
    """How long a step with streams may take."""
    share = min(max(oldest_waiting_seconds / RAISE_SECONDS, 0.0), 1.0)
    multiple = STREAM_MULTIPLE + (MAX_STREAM_MULTIPLE - STREAM_MULTIPLE) * share
    multiple *= 1 + WAITER_RAISE * behind_per_stream
    target = min(max(multiple * without_prompts, MIN_STREAM_SECONDS), MAX_STREAM_SECONDS)
    return max(target, 2 * without_prompts)
