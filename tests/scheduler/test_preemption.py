"""Urgent requests take the place of much less urgent ones, and of no more than they need."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from millstream.scheduler import preemption
from millstream.scheduler.preemption import victims_to_preempt
from millstream.scheduler.req import Req, ReqStatus
from tests.scheduler.admission_set_up import random_prompt
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness


def make_harness(num_pages: int = 100, max_running_requests: int = 3, **options: int | bool | str) -> Harness:
    return Harness(
        num_pages=num_pages,
        page_size=1,
        max_running_requests=max_running_requests,
        **{"enable_priority_scheduling": True, "disable_overlap_schedule": True, **options},
    )


def run_all(harness: Harness, asks: Sequence[tuple[str, int]], *, length: int = 4, outputs: int = 30) -> None:
    """Let requests of these priorities run."""
    for i, (rid, priority) in enumerate(asks):
        harness.ask(rid, [i + 10] * length, outputs, priority=priority)
        harness.step()
        assert harness.req(rid).status is ReqStatus.RUNNING


def victims(harness: Harness) -> list[str]:
    return [req.rid for req in victims_to_preempt(harness.state)]


def test_for_a_row_the_least_important_goes_and_of_these_the_newest() -> None:
    harness = make_harness()
    run_all(harness, [("old", -20), ("new", -20), ("important", 0)])
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert victims(harness) == ["new"]


@pytest.mark.parametrize(("priority", "expected"), [(10, []), (11, ["bulk"])])
def test_the_difference_has_to_exceed_the_threshold(priority: int, expected: list[str]) -> None:
    harness = make_harness(max_running_requests=1, priority_scheduling_preemption_threshold=10)
    run_all(harness, [("bulk", 0)])
    harness.ask("urgent", [1, 2], 5, priority=priority)
    assert victims(harness) == expected


def test_nobody_goes_where_a_row_is_free_and_memory_suffices() -> None:
    harness = make_harness(max_running_requests=4)
    run_all(harness, [("a", -20), ("b", -20), ("c", -20)])
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert victims(harness) == []


def test_nobody_goes_without_the_flag() -> None:
    harness = make_harness(enable_priority_scheduling=False)
    run_all(harness, [("a", -20), ("b", -20), ("c", -20)])
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert victims(harness) == []


def test_nobody_goes_in_vain() -> None:
    harness = make_harness(max_running_requests=8)
    run_all(harness, [("bulk", -20)], length=10)
    run_all(harness, [("important", 0)], length=60)
    harness.ask("urgent", [1] * 40, 20, priority=5)
    assert victims(harness) == []


def test_for_memory_as_many_go_as_are_needed_and_a_spare_one_stays() -> None:
    harness = make_harness(max_running_requests=8, schedule_conservativeness=0.0)
    run_all(harness, [("small", -30)], length=5)
    run_all(harness, [("big", -20)], length=50)
    run_all(harness, [("other", -15)], length=20)
    harness.ask("urgent", [1] * 30, 20, priority=5)
    assert victims(harness) == ["big"]
    harness.ask("more_urgent", [1] * 50, 30, priority=6)
    assert victims(harness) == ["big", "other"]


def test_one_that_was_preempted_or_retracted_three_times_is_left_alone() -> None:
    harness = make_harness(max_running_requests=1)
    run_all(harness, [("bulk", -20)])
    harness.req("bulk").num_retractions = 3
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert victims(harness) == []


def test_one_that_had_aged_is_left_alone_because_it_would_come_first_again() -> None:
    harness = make_harness(max_running_requests=1, schedule_ageing_steps=5)
    run_all(harness, [("first", -20)], outputs=10)
    harness.ask("bulk", [3], 30, priority=-20)
    while harness.req("bulk").is_queued:
        harness.step()
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert victims(harness) == []


def test_a_row_of_an_ended_request_is_waited_for() -> None:
    harness = make_harness(max_running_requests=2)
    run_all(harness, [("a", -20), ("b", -20)])
    harness.plan()
    harness.abort("a")
    harness.ask("urgent", [1, 2], 5, priority=5)
    assert harness.state.ending
    assert victims(harness) == []


def test_a_request_that_is_computed_in_part_may_go() -> None:
    harness = make_harness(max_running_requests=1, chunked_prefill_size=8)
    harness.ask("bulk", [1] * 30, 5, priority=-20)
    harness.step()
    assert harness.req("bulk").status is ReqStatus.PREFILLING
    harness.ask("urgent", [2, 3], 5, priority=5)
    assert victims(harness) == ["bulk"]
    harness.step()
    assert harness.req("urgent").status is ReqStatus.RUNNING
    harness.run()


def test_an_urgent_request_that_waits_for_a_prefix_preempts_nobody() -> None:
    harness = make_harness(200, max_running_requests=2)
    run_all(harness, [("bulk", -20)])
    harness.ask("first", random_prompt(Random(0), 60), 5, priority=5)
    harness.plan()
    harness.ask("follower", [*random_prompt(Random(0), 60), 1], 5, priority=5)
    assert victims(harness) == []
    harness.answer()
    assert victims(harness) == ["bulk"]


def test_without_anyone_less_urgent_no_running_request_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()
    run_all(harness, [("a", 5), ("b", 5), ("c", 5)])
    harness.ask("d", [1], 5, priority=14)

    def fail(*_: object) -> None:
        raise AssertionError("the running requests are looked at")

    monkeypatch.setattr(preemption, "_candidates", fail)
    assert victims(harness) == []


def test_a_victim_goes_on_with_the_same_text_and_its_client_sees_one_end() -> None:
    harness = make_harness(max_running_requests=1, disable_overlap_schedule=False)
    client = harness.ask("bulk", [7, 8, 9], 20, priority=-20)
    for _ in range(5):
        harness.step()
    urgent = harness.ask("urgent", [1, 2], 3, priority=5)
    harness.run()
    assert client.output_ids == reference_outputs([7, 8, 9], VOCAB_SIZE, 20)
    assert urgent.output_ids == reference_outputs([1, 2], VOCAB_SIZE, 3)
    assert (client.generation, harness.state.stats.num_preemptions) == (1, 1)
    _, events = harness.state.journal.explain("bulk")
    assert [event.numbers["by"] for event in events if event.what == "preempted"] == ["urgent"]


def test_of_random_loads_no_victim_could_have_stayed() -> None:
    met = 0
    for seed in range(150):
        rng = Random(seed)
        harness = make_harness(120, rng.choice([3, 8]), schedule_conservativeness=rng.choice([0.0, 1.0]), check_every=9)
        for i in range(rng.randint(3, 8)):
            prompt = [*random_prompt(Random(i % 2), rng.choice([0, 12])), *random_prompt(rng, rng.randint(2, 20))]
            harness.ask(f"r{i}", prompt, rng.randint(5, 30), priority=rng.randrange(-30, 5))
        for _ in range(3):
            harness.step()
        harness.ask("urgent", random_prompt(rng, rng.randint(5, 60)), rng.randint(5, 40), priority=15)
        chosen = victims_to_preempt(harness.state)
        if not chosen or harness.state.in_flight:
            continue
        met += 1
        assert_minimal(harness, chosen)
        assert all(15 - req.priority > 10 for req in chosen)
        harness.step()
        assert not harness.req("urgent").is_queued, f"seed {seed}: they went in vain"
        harness.run()
    assert met > 40


def assert_minimal(harness: Harness, chosen: list[Req]) -> None:
    """No part of them would do."""
    state = harness.state
    head = next(state.waiting_queue.candidates(state.next_step, []))
    need = preemption._Need(state, head)
    for size in range(len(chosen)):
        for fewer in combinations(chosen, size):
            has_row = bool(state.free_rows) or size > 0
            assert not (has_row and need.is_covered_by(list(fewer)))
