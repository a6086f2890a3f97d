"""What a scheduler is measured with: the same requests in the same steps, whoever's scheduler it is.

256 requests run; in every step each of them gets a token, one ends, the next of those that wait is admitted, and one
arrives. A prompt is one of 50 shared beginnings of 4 pages and 8 pages of its own. Needs nothing but Python: peers run
it in interpreters of their own.
"""

import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NUM_RUNNING, OUTPUT_LEN, PROMPT_LEN, SHARED_LEN, NUM_GROUPS = 256, 256, 192, 64, 50
NUM_PAGES, PAGE_SIZE = 16_384, 16  # the cache is full when the measured steps begin, so that pages come by eviction
CHUNKED_PREFILL_SIZE, MAX_PREFILL_TOKENS = 2048, 16_384
VOCAB_SIZE = 50_000
EOS_TOKEN_ID = VOCAB_SIZE - 1  # never drawn: every request ends by its length
WARM_UP_STEPS = 2 * OUTPUT_LEN


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives."""

    rid: str
    token_ids: "array[int]"
    max_new_tokens: int
    seed: int


class Server(Protocol):
    """A scheduler, and a worker that answers with random tokens."""

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        ...

    def ask(self, request: Request) -> None:
        """A request arrives."""
        ...

    def step(self) -> None:
        """Plan one step, and take its result or that of the one before it."""
        ...


class Load:
    """The requests, drawn from one seed, and the steps of one server."""

    def __init__(self, server: Server, num_waiting: int) -> None:
        """Brings it to the state that is measured: 256 run, one step apart from each other, and `num_waiting` wait."""
        self.server = server
        self.num_waiting = num_waiting
        self.num_asked = 0
        self._random = random.Random(0)
        self._shared = [random_ids(self._random, SHARED_LEN) for _ in range(NUM_GROUPS)]
        for _ in range(NUM_RUNNING):
            self._ask()
            server.step()
        self.run(WARM_UP_STEPS)

    def run(self, num_steps: int) -> None:
        """So many steps. As many arrive as are admitted, so that `num_waiting` wait when a step is planned."""
        for _ in range(num_steps):
            while self.server.num_waiting < self.num_waiting:
                self._ask()
            self.server.step()

    def _ask(self) -> None:
        self.num_asked += 1
        token_ids = self._random.choice(self._shared) + random_ids(self._random, PROMPT_LEN - SHARED_LEN)
        self.server.ask(Request(f"{self.num_asked:024x}", token_ids, OUTPUT_LEN, seed=1))


def random_ids(rng: random.Random, count: int) -> "array[int]":
    """Tokens of the vocabulary, but for the one that ends a text."""
    return array("i", [rng.randrange(VOCAB_SIZE - 1) for _ in range(count)])


def median_us(seconds: Sequence[float]) -> float:
    """Seconds to microseconds."""
    return round(1e6 * statistics.median(seconds), 1)


def p99_us(seconds: Sequence[float]) -> float:
    """What one in a hundred exceeds."""
    return round(1e6 * sorted(seconds)[int(0.99 * len(seconds))], 1)
