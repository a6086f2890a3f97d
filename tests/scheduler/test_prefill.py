"""The prefill rows of a step, and what the journal says of those that were left out."""

from random import Random
from typing import Any

import pytest

from millstream.scheduler import prefill
from millstream.scheduler.chunk_size import ChunkBudget, ChunkSize
from millstream.scheduler.memory_forecast import Holder, MemoryForecast
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.req import ReqStatus
from tests.scheduler.admission_set_up import make_req, random_prompt, run
from tests.scheduler.harness import Harness


def blocked(harness: Harness, rid: str) -> list[dict[str, Any]]:
    """What kept a request out, as its journal tells it."""
    _, events = harness.state.journal.explain(rid)
    return [event.numbers for event in events if event.what == "blocked"]


def test_the_first_that_finds_no_row_is_told_so_once_for_all_steps() -> None:
    harness = Harness(max_running_requests=1)
    harness.ask("running", [1, 2], 12)
    harness.ask("first", [3, 4], 2)
    harness.ask("second", [5, 6], 2)
    harness.run()
    assert [(numbers["reason"], numbers["rows"]) for numbers in blocked(harness, "first")] == [("rows", 1)]
    assert blocked(harness, "first")[0]["steps"] > 10


def test_who_finds_the_chunk_budget_used_up_is_told_so() -> None:
    harness = Harness(chunked_prefill_size=16)
    harness.ask("long", random_prompt(Random(0), 40), 4)
    harness.ask("short", [1, 2, 3], 4)
    harness.plan()
    assert [numbers["reason"] for numbers in blocked(harness, "short")] == ["chunk budget"]
    harness.run()


def test_who_finds_the_input_budget_used_up_is_told_so() -> None:
    harness = Harness(chunked_prefill_size=-1, max_prefill_tokens=16)
    harness.ask("a", random_prompt(Random(0), 8), 4)
    harness.ask("b", random_prompt(Random(1), 12), 4)
    harness.plan()
    (numbers,) = blocked(harness, "b")
    assert (numbers["reason"], numbers["need"], numbers["rem_input_tokens"]) == ("input budget", 12, 8)
    harness.run()


def test_who_lacks_memory_is_told_by_how_much() -> None:
    harness = Harness(num_pages=100, page_size=1, schedule_conservativeness=1.0)
    harness.ask("running", random_prompt(Random(0), 30), 50)
    harness.ask("head", random_prompt(Random(1), 30), 30)
    harness.plan()
    (numbers,) = blocked(harness, "head")
    assert (numbers["reason"], numbers["need"]) == ("memory", 61)
    assert numbers["lacking"] == 61 - numbers["rem_total_tokens"]
    harness.run()


def test_an_allocation_that_fails_after_all_leaves_the_request_in_the_queue_and_the_server_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    client = harness.ask("r", [1, 2, 3], 4)
    monkeypatch.setattr(PagePool, "alloc", lambda pool, num_pages: None if num_pages else [])
    assert not harness.plan()
    assert harness.req("r").status is ReqStatus.WAITING
    monkeypatch.undo()
    harness.run()
    assert len(client.output_ids) == 4


def test_a_chunk_takes_all_running_decodes_along_and_its_size_follows_the_steps() -> None:
    harness = Harness(num_pages=2000, page_size=4, chunked_prefill_size=0, context_len=4000, check_every=20)
    for i in range(4):
        harness.ask(f"stream{i}", [i, 1], 200)
    harness.step()
    harness.ask("long", random_prompt(Random(0), 3000), 2)
    while harness.req("long").status is not ReqStatus.RUNNING:
        harness.step()
        for step in harness.state.in_flight:
            assert len(step.decodes) == 4 or not step.extends
    assert harness.state.stats.chunk_tokens > 0
    harness.run()


def test_who_goes_on_or_would_be_first_does_not_wait_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    budget = ChunkSize.budget

    def watch(chunk_size: ChunkSize, num_decodes: int, num_behind: int, waited: float) -> ChunkBudget | None:
        seen.append((num_decodes, num_behind))
        return budget(chunk_size, num_decodes, num_behind, waited)

    monkeypatch.setattr(ChunkSize, "budget", watch)
    harness = Harness(chunked_prefill_size=16)
    harness.ask("first", random_prompt(Random(0), 40), 4)
    harness.plan()
    for index in range(2):
        harness.ask(f"next{index}", random_prompt(Random(index), 40), 4)
    harness.plan()
    assert seen == [(0, 0), (0, 2)]
    harness.run()


def test_few_candidates_are_looked_at_behind_a_blocked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_pages=100, page_size=1, max_running_requests=64, check_every=50)
    harness.ask("running", random_prompt(Random(0), 30), 60)
    harness.ask("head", random_prompt(Random(1), 30), 30)
    harness.plan()
    for i in range(200):
        harness.ask(f"r{i}", random_prompt(Random(i), 25), 90)
    looked_up = []
    init = PagePool.init_next_round_input
    monkeypatch.setattr(PagePool, "init_next_round_input", lambda pool, req: (looked_up.append(req), init(pool, req)))
    harness.plan()
    assert 2 < len(looked_up) <= 1 + prefill.MAX_TRIED_PAST_HEAD
    monkeypatch.undo()
    harness.run()


# ---- the forecast ------------------------------------------------------------------------------------------------


def test_memory_is_lowest_just_before_somebody_ends() -> None:
    pool = PagePool(100, 1)
    first, second = run(pool, make_req(20, 10)), run(pool, make_req(30, 25, first=100))
    forecast = MemoryForecast(pool, [Holder(10, 1.0, 0, 10, first), Holder(25, 1.0, 0, 25, second)])
    # 50 are free; a third takes 15 at once: 35 - 3 * 10 before the first ends, and 55 - 2 * 20 before it ends itself
    assert forecast.low_water(15, 20) == 35 - 30 - 3
    assert forecast.low_water(5, 4) == 45 - 12 - 3
    assert [(step.holder.req, step.freed_tokens) for step in forecast.completions()] == [(first, 20), (second, 30)]


def test_a_request_starts_when_others_have_ended_or_end_early_enough_for_what_it_will_need() -> None:
    pool = PagePool(200, 1)
    first, second = run(pool, make_req(40, 10)), run(pool, make_req(50, 40, first=100))
    forecast = MemoryForecast(pool, [Holder(10, 1.0, 0, 10, first), Holder(40, 1.0, 0, 40, second)])
    assert forecast.find_start(70, 20)[0] == 0
    assert forecast.find_start(85, 20)[0] == 6  # 110 - 85 - 3 * 10 is 5 too little; 6 steps later it has taken 6 less
    assert forecast.find_start(95, 20)[0] == 10
