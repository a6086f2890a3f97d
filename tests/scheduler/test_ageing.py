"""The bounds on waiting (waiting_queue.py) held by the whole scheduler."""

import random
from typing import Any, NamedTuple

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


class Load(NamedTuple):
    """Of each request, in order of arrival, the steps of its arrival and start; and the most steps that one runs."""

    arrivals: list[int]
    starts: list[int]
    longest: int


def run_load(seed: int, *, num_pages: int, max_rows: int, **options: Any) -> Load:
    """A random load whose lifetimes are known."""
    rng = random.Random(seed)
    harness = Harness(
        num_pages=num_pages,
        page_size=4,
        max_running_requests=rng.randrange(1, max_rows + 1),
        schedule_ageing_steps=AGEING_STEPS,
        max_queued_tokens=100_000,
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
    rids = [f"r{index}" for index in range(num_asked)]
    return Load(
        [step_of(harness, rid, "queued") for rid in rids], [step_of(harness, rid, "admitted") for rid in rids], longest
    )


def step_of(harness: Harness, rid: str, what: str) -> int:
    _, events = harness.state.journal.explain(rid)
    return next(event.step for event in events if event.what == what)


@pytest.mark.parametrize("policy", POLICIES)
def test_where_rows_are_the_limit_nobody_starts_much_later_than_under_fcfs(policy: str) -> None:
    num_later = 0
    for seed in range(12):
        fcfs = run_load(seed, num_pages=2000, max_rows=4)
        load = run_load(seed, num_pages=2000, max_rows=4, **POLICIES[policy])
        for start, fcfs_start in zip(load.starts, fcfs.starts, strict=True):
            assert start - fcfs_start <= AGEING_STEPS + 3 * load.longest, f"seed {seed}"
            num_later += start > fcfs_start + AGEING_STEPS
    assert num_later, "loads in which nobody has to wait longer show nothing"


@pytest.mark.parametrize("policy", ["fcfs", *POLICIES])
def test_whatever_the_limit_is_who_has_aged_waits_for_the_older_ones_alone(policy: str) -> None:
    num_aged = 0
    for seed in range(12):
        load = run_load(seed, num_pages=22, max_rows=12, **POLICIES.get(policy, {}))
        for index, (arrival, start) in enumerate(zip(load.arrivals, load.starts, strict=True)):
            aged_at = arrival + AGEING_STEPS
            num_older = sum(other >= aged_at for other in load.starts[:index])
            assert start <= aged_at + (num_older + 1) * load.longest, f"seed {seed}"
            num_aged += start > aged_at
    assert num_aged > 50, "loads in which nobody ages show nothing"
