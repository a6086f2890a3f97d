"""What each policy is for, in one test each, and what all have in common."""

from random import Random

import pytest

from millstream.common.config import SCHEDULE_POLICIES
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.req import Req
from millstream.scheduler.schedule_policy import CHEAP_WALK, MAX_REUSES, DepthFirstOrder
from millstream.scheduler.waiting_queue import WaitingQueue
from tests.scheduler.admission_set_up import cache, make_queue, make_req, random_prompt
from tests.scheduler.harness import Harness


def order(queue: WaitingQueue, running: list[Req] | None = None) -> str:
    return "".join(req.rid for req in queue.candidates(1, running or []))


def test_fcfs_serves_by_arrival() -> None:
    queue = make_queue("fcfs")
    for rid, arrival in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.add(make_req(4, rid=rid, arrival=arrival), 0)
    assert order(queue) == "abc"


def test_lof_starts_the_longest_outputs_first_so_that_they_do_not_run_alone_at_the_end() -> None:
    queue = make_queue("lof")
    for i, (rid, outputs) in enumerate((("a", 5), ("b", 50), ("c", 5), ("d", 500))):
        queue.add(make_req(4, outputs, rid=rid, arrival=float(i)), 0)
    assert order(queue) == "dbac"
    steps = {}
    for policy in ("fcfs", "lof"):
        harness = Harness(max_running_requests=2, schedule_policy=policy)
        for i, outputs in enumerate((10, 10, 10, 30)):
            harness.ask(f"r{i}", [i, 1], outputs)
        harness.run()
        steps[policy] = harness.state.next_step
    assert steps["lof"] < steps["fcfs"]


def test_random_shuffles_by_the_servers_seed_and_keeps_each_draw() -> None:
    orders = []
    for seed in (1, 1, 2):
        queue = make_queue("random", seed=seed)
        reqs = [make_req(4, rid=rid, arrival=float(i)) for i, rid in enumerate("abcdefgh")]
        for req in reqs:
            queue.add(req, 0)
        orders.append(order(queue))
        queue.remove(reqs[3])
        queue.add(reqs[3], 1)
        assert order(queue) == orders[-1]
    assert orders[0] == orders[1] != orders[2]
    assert "abcdefgh" not in orders


def test_routing_key_keeps_tenants_together_that_run_already() -> None:
    queue = make_queue("routing-key")
    for i, (rid, key) in enumerate((("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "z"), ("f", "w"))):
        queue.add(make_req(4, rid=rid, arrival=float(i), routing_key=key), 0)
    running = [make_req(4, first=i, routing_key=key) for i, key in enumerate(("y", "x", "y", "w", None))]
    assert order(queue, running) == "cbdfae"  # y runs twice; x and w once, by arrival; then the others
    assert order(queue, []) == "abcdef"


def test_lpm_uses_what_is_cached_before_it_is_evicted() -> None:
    pool = PagePool(100, 4)
    cache(pool, list(range(40)))
    queue = make_queue("lpm", pool)
    queue.add(make_req(0, rid="a", token_ids=[9] * 20), 0)
    queue.add(make_req(0, rid="b", token_ids=[*range(10), 7, 7]), 0)
    queue.add(make_req(0, rid="c", token_ids=[*range(30), 7]), 0)
    assert order(queue) == "cba"


def test_lpm_follows_the_tree_without_looking_again_at_those_that_it_does_not_touch() -> None:
    pool = PagePool(100, 4)
    queue = make_queue("lpm", pool)
    for i, rid in enumerate("ab"):
        queue.add(make_req(0, rid=rid, arrival=float(i), token_ids=[*range(10 * i, 10 * i + 20), 1]), 0)
    assert order(queue) == "ab"
    cache(pool, list(range(10, 30)))
    assert order(queue) == "ba"
    cache(pool, list(range(20)))
    assert order(queue) == "ab"
    pool.allocator.free(pool.tree_cache.evict(3))
    assert sorted(order(queue)) == ["a", "b"]


def test_lpm_does_not_give_up_on_a_long_queue() -> None:
    pool = PagePool(100, 4)
    cache(pool, list(range(40)))
    queue = make_queue("lpm", pool)
    for i in range(500):
        queue.add(make_req(0, rid=f"r{i}", arrival=float(i), token_ids=[*random_prompt(Random(i), 20), 49]), 0)
    queue.add(make_req(0, rid="hit", arrival=1000.0, token_ids=[*range(40), 1]), 0)
    assert next(queue.candidates(1, [])).rid == "hit"


def test_dfs_weight_uses_up_one_branch_before_the_next_the_fullest_first() -> None:
    pool = PagePool(100, 4)
    trunk = list(range(8))
    left, right = [*trunk, *[20] * 8], [*trunk, *[30] * 8]
    for branch in (left, right, [*right, *[31] * 4], [40] * 8):
        cache(pool, branch)
    queue = make_queue("dfs-weight", pool)
    prompts = {"a": left, "b": right, "c": [*right, *[31] * 4], "d": [45] * 8, "e": left, "f": right, "g": [40] * 8}
    for i, (rid, prompt) in enumerate(prompts.items()):
        queue.add(make_req(0, rid=rid, arrival=float(i), token_ids=[*prompt, 1, 2]), 0)
    assert order(queue) == "cbfaegd"  # under right: c below b and f; then left; then the other prefix; then no prefix


def test_dfs_weight_loses_nobody_when_prefixes_are_evicted_or_split() -> None:
    rng = Random(0)
    pool = PagePool(60, 4)
    queue = make_queue("dfs-weight", pool)
    for i in range(60):
        base = random_prompt(Random(rng.randrange(4)), 16)
        queue.add(make_req(0, rid=f"r{i}", token_ids=[*base, *random_prompt(rng, 4), 1]), 0)
        cache(pool, [*base[: rng.randrange(17)], *random_prompt(rng, 8)])
        if rng.random() < 0.3:
            pool.allocator.free(pool.tree_cache.evict(rng.randrange(20)))
        assert len({req.rid for req in queue.candidates(1, [])}) == i + 1


def test_dfs_weight_does_not_walk_a_wide_tree_anew_in_every_step() -> None:
    pool = PagePool(4000, 4)
    queue = make_queue("dfs-weight", pool)
    for i in range(1000):
        cache(pool, [i] * 4)
        queue.add(make_req(0, rid=f"r{i}", arrival=float(i), token_ids=[i] * 6), 0)
    walks: list[str] = []
    for _ in range(2 * (MAX_REUSES + 1)):
        walks.append(next(queue.candidates(1, [])).rid)
        queue.remove(next(queue.candidates(1, [])))
        assert len({req.rid for req in queue.candidates(1, [])}) == len(queue)
    assert len(set(walks)) == len(walks)
    policy = queue._policy
    assert isinstance(policy, DepthFirstOrder)
    assert policy._num_looked_at > CHEAP_WALK
    assert policy._num_reuses > 0


def test_dfs_weight_serves_by_arrival_those_whose_prefix_was_evicted_a_moment_ago() -> None:
    pool = PagePool(60, 4)
    cache(pool, list(range(16)))
    queue = make_queue("dfs-weight", pool)
    for i in range(200):
        queue.add(make_req(0, rid=f"r{i}", arrival=float(i), token_ids=[*range(16), i, 1]), 0)
    pool.allocator.free(pool.tree_cache.evict(4))
    assert {req.rid for req in queue.candidates(1, [])} == {f"r{i}" for i in range(200)}


@pytest.mark.parametrize("policy", ["fcfs", "lof"])
def test_priority_goes_before_the_policy(policy: str) -> None:
    queue = make_queue(policy, priorities=True)
    for i, (rid, priority, outputs) in enumerate((("a", 0, 5), ("b", 7, 1), ("c", 7, 5), ("d", -1, 9))):
        queue.add(make_req(4, outputs, rid=rid, arrival=float(i), priority=priority), 0)
    assert order(queue) == ("bcad" if policy == "fcfs" else "cbad")


def test_without_the_flag_priorities_mean_nothing() -> None:
    queue = make_queue("fcfs")
    for i, rid in enumerate("ab"):
        queue.add(make_req(4, rid=rid, arrival=float(i), priority=i), 0)
    assert order(queue) == "ab"


@pytest.mark.parametrize("policy", ["lof", "lpm", "dfs-weight"])
def test_a_request_that_ran_before_goes_ahead_of_its_equals(policy: str) -> None:
    queue = make_queue(policy)
    for i, rid in enumerate("abc"):
        req = make_req(4, rid=rid, arrival=float(i))
        req.num_retractions = int(rid == "c")
        queue.add(req, 0)
    assert order(queue) == ("cab" if policy != "dfs-weight" else "abc")  # at one node dfs-weight goes by arrival


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_with_the_cache_off_cache_aware_policies_are_fcfs(policy: str) -> None:
    queue = make_queue(policy, PagePool(100, 4, disable_radix_cache=True))
    for rid, arrival in (("b", 2.0), ("a", 1.0)):
        queue.add(make_req(20, rid=rid, arrival=arrival), 0)
    assert order(queue) == "ab"


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_a_policy_is_an_order_of_exactly_those_that_wait(policy: str) -> None:
    rng = Random(policy)
    pool = PagePool(100, 4)
    queue = make_queue(policy, pool)
    waiting: dict[str, Req] = {}
    for i in range(120):
        if waiting and rng.random() < 0.4:
            req = waiting.pop(rng.choice(sorted(waiting)))
            queue.remove(req)
        else:
            token_ids = [*random_prompt(Random(rng.randrange(4)), 12), *random_prompt(rng, 5)]
            key = rng.choice([None, "x", "y"])
            req = make_req(0, rid=f"r{i}", arrival=rng.random(), token_ids=token_ids, routing_key=key)
            waiting[req.rid] = req
            queue.add(req, i)
        if rng.random() < 0.2:
            cache(pool, random_prompt(Random(rng.randrange(4)), 12))
        running = [make_req(2, first=j, routing_key=rng.choice(["x", "z"])) for j in range(3)]
        found = [req.rid for req in queue.candidates(i, running)]
        assert sorted(found) == sorted(waiting)
