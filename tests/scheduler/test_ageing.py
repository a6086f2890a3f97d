"""The bound on waiting (waiting_queue.py) held by the whole scheduler, where rows are the limit."""

import random
from typing import Any

import pytest

from tests.scheduler.harness import Harness

AGEING_STEPS = 10
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"schedule_policy": name} for name in ("lof", "random", "routing-key", "lpm", "dfs-weight")},
    "fcfs with priorities": {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 1000},
    "lof with priorities": {
        "schedule_policy": "lof",
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 1000,
    },
}


def start_steps(seed: int, **options: Any) -> tuple[list[int], int]:
    """The steps in which the requests of a random load start, and the most steps that one of them runs."""
    rng = random.Random(seed)
    harness = Harness(
        num_pages=2000,
        page_size=4,
        max_running_requests=rng.randrange(1, 5),
        schedule_ageing_steps=AGEING_STEPS,
        disable_overlap_schedule=True,
        check_every=100,
        **options,
    )
    longest, num_asked = 0, 0
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 1, 3))):
            num_tokens = rng.choice((1, 3, 20))
            longest = max(longest, num_tokens + 1)
            family, priority, routing_key = rng.randrange(3), rng.randrange(5), rng.choice("ab")
            prompt = [*[family] * 8, num_asked % 50, num_asked // 50, *rng.choices(range(50), k=rng.randrange(1, 20))]
            rid = f"r{num_asked}"
            harness.ask(rid, prompt, num_tokens, ignore_eos=True, priority=priority, routing_key=routing_key)
            num_asked += 1
        harness.step()
    harness.run()
    return [admitted_step(harness, f"r{index}") for index in range(num_asked)], longest


def admitted_step(harness: Harness, rid: str) -> int:
    _, events = harness.state.journal.explain(rid)
    return next(event.step for event in events if event.what == "admitted")


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starts_later_than_the_bound_allows(policy: str) -> None:
    num_later = 0
    for seed in range(12):
        first_come, longest = start_steps(seed)
        starts, _ = start_steps(seed, **POLICIES[policy])
        for step, fcfs_step in zip(starts, first_come, strict=True):
            assert step - fcfs_step <= AGEING_STEPS + 3 * longest, f"seed {seed}"
            num_later += step > fcfs_step + AGEING_STEPS
    assert num_later, "loads in which nobody has to wait longer show nothing"
