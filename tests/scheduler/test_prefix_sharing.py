"""Of several that share a new prefix one computes it; the others wait for its pages, and never for too long."""

from random import Random

import pytest

from millstream.common.batch_messages import ScheduleBatch
from millstream.common.config import SCHEDULE_POLICIES
from millstream.common.messages import unpack_int32
from millstream.scheduler import prefill
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.prefix_sharing import PrefixesOnTheWay
from tests.scheduler.admission_set_up import cache, make_req, random_prompt
from tests.scheduler.harness import Harness


def find(pool: PagePool, prompt: list[int], *others: list[int]) -> tuple[str, int] | None:
    on_the_way = PrefixesOnTheWay(
        pool.page_size, [make_req(0, token_ids=other, rid=f"other{i}") for i, other in enumerate(others)]
    )
    req = make_req(0, token_ids=prompt)
    pool.init_next_round_input(req)
    found = on_the_way.find(req)
    return found and (found[0].rid, found[1])


def test_the_longest_shared_prefix_is_waited_for_in_whole_pages() -> None:
    base = random_prompt(Random(0), 80)
    pool = PagePool(10, 4)
    assert find(pool, [*base, 1], [*base[:40], 1, 2], [*base[:63], 1]) == ("other1", 60)
    assert find(pool, [*base, 1], [*base, 2]) == ("other0", 80)
    assert find(pool, base, base) == ("other0", 76)  # the last token is always computed


def test_less_than_32_new_tokens_are_not_worth_waiting_for() -> None:
    base = random_prompt(Random(0), 80)
    pool = PagePool(30, 4)
    assert find(pool, [*base, 1], [*base[:31], 9]) is None
    assert find(pool, [*base, 1], [*base[:32], 9]) == ("other0", 32)
    cache(pool, base[:40])
    assert find(pool, [*base, 1], [*base[:71], 9]) is None
    assert find(pool, [*base, 1], [*base[:72], 9]) == ("other0", 72)


def test_equal_tokens_after_different_cached_beginnings_are_not_shared() -> None:
    rng = Random(0)
    first, second, same = random_prompt(rng, 40), random_prompt(rng, 40), random_prompt(rng, 40)
    pool = PagePool(30, 4)
    cache(pool, first)
    assert find(pool, [*first, *same, 1], [*first[:36], *second[36:], *same, 1]) is None


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_under_every_policy_a_shared_prefix_is_computed_once(policy: str) -> None:
    harness = Harness(num_pages=200, page_size=4, max_running_requests=16, schedule_policy=policy)
    base = random_prompt(Random(0), 80)
    for i in range(8):
        harness.ask(f"r{i}", [*base, i, 1, 2], 4)
    harness.run()
    extends = [end - start for batch in harness.batches for start, end in zip(*columns(batch), strict=True)]
    assert sum(extends) == 83 + 7 * 3


def columns(batch: ScheduleBatch) -> tuple[list[int], list[int]]:
    return unpack_int32(batch.extend_starts), unpack_int32(batch.extend_ends)


def test_who_waits_for_a_prefix_is_passed_by_those_behind_and_counts_as_no_blocked_head() -> None:
    harness = Harness(num_pages=200, page_size=4)
    base = random_prompt(Random(0), 80)
    harness.ask("first", [*base, 1], 4)
    harness.plan()
    harness.ask("follower", [*base, 2], 4)
    harness.ask("other", [5, 6], 4)
    harness.plan()
    assert harness.state.stats.num_backfills == 0
    assert [new_req.rid for new_req in harness.batches[-1].new_reqs] == ["other"]
    _, events = harness.state.journal.explain("follower")
    reasons = [event.numbers for event in events if event.what == "blocked"]
    assert reasons[0]["reason"] == "prefix of another request"
    assert (reasons[0]["of"], reasons[0]["tokens"]) == ("first", 80)
    harness.run()


def test_a_step_skips_a_bounded_number_of_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_SKIPPED", 5)
    harness = Harness(num_pages=400, page_size=4, max_running_requests=64, check_every=20)
    base = random_prompt(Random(0), 80)
    harness.ask("first", [*base, 1], 4)
    harness.plan()
    for i in range(20):
        harness.ask(f"f{i}", [*base, 2, i], 4)
    harness.ask("other", [5, 6], 4)
    harness.plan()
    looked_up = [i for i in range(20) if harness.req(f"f{i}").waits_for]
    assert looked_up == [0, 1, 2, 3, 4]
    assert harness.req("other").is_queued
    harness.run()


@pytest.mark.parametrize(("ageing_steps", "has_started"), [(1000, False), (0, True)])
def test_one_that_has_aged_computes_its_prefix_itself(ageing_steps: int, has_started: bool) -> None:
    harness = Harness(num_pages=400, page_size=4, schedule_ageing_steps=ageing_steps)
    base = random_prompt(Random(0), 80)
    harness.ask("first", [*base, 1], 4)
    harness.plan()
    harness.ask("follower", [*base, 2], 4)
    harness.plan()
    assert harness.req("follower").is_queued is not has_started
    harness.run()


def test_waiters_start_when_the_one_they_wait_for_goes_away() -> None:
    harness = Harness(num_pages=400, page_size=4, chunked_prefill_size=16)
    base = random_prompt(Random(0), 100)
    for i in range(4):
        harness.ask(f"r{i}", [*base, i], 4)
    for i in range(3):
        harness.step()
        harness.abort(f"r{i}")
    harness.run()
    assert len(harness.clients["r3"].output_ids) == 4
