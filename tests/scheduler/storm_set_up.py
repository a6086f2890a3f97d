"""Random set-ups and requests for the tests of the whole scheduler.

Whatever is drawn comes from a `random.Random`: seeded in the simulations, drawn by hypothesis in the state machine.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from millstream.common.config import AUTO_CHUNK, EVICTION_POLICIES, SCHEDULE_POLICIES
from millstream.common.messages import POOLINGS
from tests.scheduler.harness import VOCAB_SIZE

EOS = (3, 4)
FAILING_TOKEN_ID = 7
SHARED_LENS = ((1, 3, 3, 5), (1, 3, 3, 5), (3, 10, 35), (35, 40, 70))  # of a storm: short prompts fill the pool later
NUM_SLOTS = {1: (56, 112, 112), 4: (64, 112, 112), 16: (64, 128, 160, 160), 64: (128, 320, 448)}  # by page size
PRIORITY_POLICIES = ("fcfs", "lof")


@dataclass(frozen=True)
class Ask:
    """One request; prompts of a family share their beginning. Times are seconds, `ago` before the request comes in."""

    family: int
    shared_len: int
    tail: tuple[int, ...]
    max_new_tokens: int | None
    eos: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    cache_salt: str | None = None
    priority: int | None = None
    routing_key: str | None = None
    waiting_timeout: float | None = None
    timeout: float | None = None
    ago: float = 0.0
    logprob_start: int | None = None
    n: int = 1
    pooling: str | None = None  # then it has no outputs, whatever else it says

    @property
    def prompt(self) -> list[int]:
        return [(self.family * 11 + i * i) % VOCAB_SIZE for i in range(self.shared_len)] + list(self.tail)

    @property
    def ends(self) -> tuple[int, ...]:
        """The token ids that end it."""
        return () if self.ignore_eos else (*self.eos, *self.stop_token_ids)


def draw_set_up(rng: Random) -> dict[str, Any]:
    """Options of a Harness: tiny pools, so that requests wait, are evicted and retracted."""
    page_size = rng.choice([1, 1, 4, 16, 16, 64])
    has_priorities = rng.random() < 0.3
    has_limits = rng.random() < 0.3
    return {
        "page_size": page_size,
        "num_pages": rng.choice(NUM_SLOTS[page_size]) // page_size,
        "max_running_requests": rng.choice([1, 3, 8, 8, 8, 8, 8]),
        "context_len": rng.choice([90, 1000, 1000]),
        "chunked_prefill_size": rng.choice([-1, AUTO_CHUNK, 16, 16, 64]),
        "max_prefill_tokens": rng.choice([16, 48, 16384, 16384]),
        "schedule_policy": rng.choice(PRIORITY_POLICIES if has_priorities else SCHEDULE_POLICIES),
        "schedule_ageing_steps": rng.choice([4, 30, 1000]),
        "schedule_conservativeness": rng.choice([0.0, 0.0, 0.0, 1.0]),
        "enable_priority_scheduling": has_priorities,
        "schedule_low_priority_values_first": rng.random() < 0.3,
        "priority_scheduling_preemption_threshold": rng.choice([0, 2, 10]),
        "radix_eviction_policy": rng.choice(EVICTION_POLICIES),
        "max_queued_requests": rng.choice([3, 2048]) if has_limits else 2048,
        "max_queued_tokens": rng.choice([None, 60]) if has_limits else None,
        "request_waiting_timeout": rng.choice([0.0, 40.0]) if has_limits else 0.0,
        "request_timeout": rng.choice([0.0, 80.0]) if has_limits else 0.0,
        "disable_overlap_schedule": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.2,
        "decode_width": rng.choice([1, 1, 3]),
        "random_seed": rng.randrange(100),
        "failing_token_id": rng.choice([*[None] * 8, FAILING_TOKEN_ID]),
    }


def draw_ask(rng: Random, shared_lens: tuple[int, ...]) -> Ask:
    """A request whose outputs may be long for the pools."""
    pooling = rng.choice([*[None] * 10, *POOLINGS])
    max_new_tokens = rng.choice([1, 6, 12, 25, 25, 40, 40, 40, 60, None if rng.random() < 0.3 else 30])
    return Ask(
        family=rng.randrange(3),
        shared_len=rng.choice(shared_lens),
        tail=tuple(rng.randrange(5, 13) for _ in range(rng.randrange(4))),
        max_new_tokens=max_new_tokens,
        eos=rng.choice([(), (), EOS]),
        stop_token_ids=rng.choice([(), (), (), (), (9,)]),
        ignore_eos=rng.random() < 0.15,
        min_new_tokens=min(rng.choice([0, 0, 1, 4]), max_new_tokens or 4),
        cache_salt=rng.choice([None, None, None, "salt"]),
        priority=rng.choice([None, 0, 1, 5, -3]),
        routing_key=rng.choice([None, "a", "b"]),
        waiting_timeout=rng.choice([*[None] * 12, 5.0]),
        timeout=rng.choice([*[None] * 12, 20.0]),
        ago=rng.choice([0.0, 0.0, 0.0, 2.5, -0.5]),
        logprob_start=None if pooling else rng.choice([None, None, None, -1, 0, 1]),
        n=1 if pooling else rng.choice([*[1] * 9, 2, 4]),
        pooling=pooling,
    )
