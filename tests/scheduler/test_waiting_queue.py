"""The queue: who is first, for how long a policy may pass somebody over, and what a long queue costs."""

from collections.abc import Iterator
from random import Random

import pytest

from millstream.common.config import SCHEDULE_POLICIES
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.req import Req
from millstream.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.admission_set_up import cache, make_queue, make_req, random_prompt


def ask(queue: WaitingQueue, rid: str, step: int = 0, arrival: float = 0.0, priority: int = 0, outputs: int = 5) -> Req:
    req = make_req(6, outputs, rid=rid, arrival=arrival, priority=priority)
    queue.add(req, step)
    return req


def rids(reqs: Iterator[Req]) -> list[str]:
    return [req.rid for req in reqs]


def test_it_counts_requests_and_tokens_and_iterates_by_arrival() -> None:
    queue = make_queue("lof")
    late, early = ask(queue, "late", arrival=2.0, outputs=9), ask(queue, "early", arrival=1.0)
    assert rids(iter(queue)) == ["early", "late"]
    assert (len(queue), queue.num_tokens, queue.oldest_waiting_seconds(5.0)) == (2, 12, 4.0)
    queue.remove(early)
    queue.remove(late)
    assert (len(queue), queue.num_tokens, queue.oldest_waiting_seconds(5.0)) == (0, 0, 0.0)
    with pytest.raises(KeyError):
        queue.remove(late)


def test_a_request_that_has_aged_goes_ahead_of_the_policy_by_arrival() -> None:
    queue = make_queue("lof", ageing=10)
    ask(queue, "b", 0, 2.0, outputs=1)
    ask(queue, "a", 1, 1.0, outputs=2)
    ask(queue, "long", 5, 3.0, outputs=9)
    assert rids(queue.candidates(9, [])) == ["long", "a", "b"]
    assert rids(queue.candidates(10, [])) == ["b", "long", "a"]
    assert rids(queue.candidates(11, [])) == ["a", "b", "long"]
    assert rids(queue.candidates(20, [])) == ["a", "b", "long"]


def test_an_aged_request_goes_ahead_of_more_urgent_ones() -> None:
    queue = make_queue(ageing=10, priorities=True)
    ask(queue, "bulk", 0, 1.0, priority=-5)
    ask(queue, "urgent", 1, 2.0, priority=5)
    assert rids(queue.candidates(9, [])) == ["urgent", "bulk"]
    assert rids(queue.candidates(10, [])) == ["bulk", "urgent"]


def test_steps_in_which_it_ran_do_not_count_as_waiting() -> None:
    queue = make_queue("lof", ageing=10)
    req = ask(queue, "preempted", 0, 1.0, outputs=1)
    next(queue.candidates(6, []))
    queue.remove(req)
    assert not queue.had_aged(req)
    queue.add(req, 100)
    ask(queue, "other", 100, 2.0, outputs=9)
    assert rids(queue.candidates(103, [])) == ["other", "preempted"]
    assert rids(queue.candidates(104, [])) == ["preempted", "other"]
    queue.remove(req)
    assert queue.had_aged(req)


def test_under_fcfs_a_retracted_request_goes_back_to_its_place() -> None:
    queue = make_queue()
    for i, rid in enumerate("abc"):
        ask(queue, rid, arrival=float(i))
    retracted = make_req(6, rid="retracted", arrival=1.0)
    retracted.num_retractions = 1
    queue.add(retracted, 5000)
    assert rids(queue.candidates(5000, [])) == ["a", "retracted", "b", "c"]


def simulate(policy: str, seed: int, ageing: int) -> tuple[dict[str, int], int]:
    """Rows are the limit, every step takes equally long: the steps in which requests start, and the longest one's."""
    rng = Random(seed)
    num_rows = rng.randint(1, 6)
    name, pool = policy.removesuffix("+priority"), PagePool(100, 4)
    queue = make_queue(name, ageing=ageing, priorities=name != policy, pool=pool)
    arrivals: dict[int, list[Req]] = {}
    for i in range(80):
        steps = rng.choice([1, 2, 3, 30])
        token_ids = [*random_prompt(Random(rng.randrange(3)), 8), *random_prompt(rng, 4)]
        key = rng.choice([None, "x", "y"])
        req = make_req(12, steps, rid=f"r{i}", priority=rng.randrange(3), token_ids=token_ids, routing_key=key)
        arrivals.setdefault(rng.randrange(150), []).append(req)
    rows: dict[Req, int] = {}
    starts: dict[str, int] = {}
    step = 0
    while len(starts) < 80:
        for req in arrivals.get(step, ()):
            req.arrival = float(step)
            queue.add(req, step)
        rows = {req: left - 1 for req, left in rows.items() if left > 1}
        while len(rows) < num_rows and queue:
            req = next(queue.candidates(step, list(rows)))
            queue.remove(req)
            rows[req] = req.max_new_tokens
            starts[req.rid] = step
            cache(pool, req.token_ids[:8].tolist())
        step += 1
    return starts, 30


@pytest.mark.parametrize("policy", [*SCHEDULE_POLICIES, "fcfs+priority", "lof+priority"])
def test_nobody_starts_later_than_under_fcfs_by_more_than_the_stated_bound(policy: str) -> None:
    worst = 0
    for seed in range(25):
        ageing = Random(seed).choice([5, 40])
        fcfs, _ = simulate("fcfs", seed, ageing)
        starts, longest = simulate(policy, seed, ageing)
        for rid, step in starts.items():
            assert step <= fcfs[rid] + ageing + 3 * longest, f"seed {seed}: {rid}"
            worst = max(worst, step - fcfs[rid])
    assert worst > 0 or policy == "fcfs"


def test_without_ageing_the_bound_would_not_hold() -> None:
    late = 0
    for seed in range(25):
        fcfs, longest = simulate("fcfs", seed, 5)
        starts, _ = simulate("lof", seed, 10**6)
        late += any(step > fcfs[rid] + 5 + 3 * longest for rid, step in starts.items())
    assert late


class CountingReq(Req):
    """Counts how often its tokens are read for a key."""

    __slots__ = ()
    num_keys = 0

    def key(self, start: int, end: int) -> bytes:
        type(self).num_keys += 1
        return super().key(start, end)


@pytest.mark.parametrize("policy", [*SCHEDULE_POLICIES, "lof+priority"])
def test_a_step_looks_at_no_more_requests_in_a_long_queue_than_in_a_short_one(policy: str) -> None:
    seen = []
    for num_waiting in (20, 2000):
        queue = make_queue(policy.removesuffix("+priority"), priorities=policy.endswith("+priority"))
        for i in range(num_waiting):
            token_ids = random_prompt(Random(i), 30)
            made = make_req(30, 1 + i % 7, rid=f"r{i}", arrival=float(i), priority=i % 3, token_ids=token_ids)
            queue.add(CountingReq(made.message, made.token_ids, made.max_new_tokens, made.priority), 0)
        CountingReq.num_keys = 0
        for step in range(10):
            queue.remove(next(queue.candidates(step, [])))
        seen.append(CountingReq.num_keys)
    assert seen[0] == seen[1]
