"""Small requests pass one that lacks memory, and do not make it wait longer."""

from random import Random

import pytest

from millstream.scheduler import prefill
from millstream.scheduler.backfilling import MAX_BACKFILLS, Reservation
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.prefill_adder import AddReqResult
from millstream.scheduler.req import Req
from tests.scheduler.admission_set_up import add, cache, make_adder, make_req, random_prompt, run
from tests.scheduler.harness import Harness


def reserve(pool: PagePool, running: list[Req], head: Req, *, chunk: int | None = None) -> Reservation:
    adder = make_adder(pool, running, ratio=1.0, chunk=chunk)
    assert add(adder, head) is AddReqResult.NO_TOKEN
    return Reservation(adder, head)


def look_up(pool: PagePool, req: Req) -> Req:
    pool.init_next_round_input(req)
    return req


def test_the_head_starts_when_the_first_have_ended_whose_memory_it_needs() -> None:
    pool = PagePool(100, 1)
    running = [run(pool, make_req(30, left, first=100 * left)) for left in (5, 2, 9)]
    reservation = reserve(pool, running, make_req(40, 5))
    # 10 are free, less 16 that the others may take: 26 after the first end, 61 after the second; the head needs 46
    assert (reservation.start_step, reservation.extra_tokens) == (5, 61 - 46)


def test_a_candidate_passes_if_it_ends_before_the_head_starts() -> None:
    pool = PagePool(100, 1)
    running = [run(pool, make_req(60, 8, first=100)), run(pool, make_req(10, 20, first=200))]
    reservation = reserve(pool, running, make_req(64, 4))
    assert reservation.start_step == 8
    assert reservation.share_of(look_up(pool, make_req(2, 7, first=300))) == 0
    assert reservation.share_of(look_up(pool, make_req(2, 8, first=300))) is None


def test_its_chunks_count_as_steps() -> None:
    pool = PagePool(200, 1)
    running = [run(pool, make_req(100, 8, first=1000)), run(pool, make_req(30, 30, first=2000))]
    reservation = reserve(pool, running, make_req(120, 6), chunk=8)
    assert reservation.start_step == 8
    assert reservation.share_of(look_up(pool, make_req(8, 7, first=300))) == 0
    assert reservation.share_of(look_up(pool, make_req(24, 6, first=300))) is None


def test_a_long_candidate_passes_if_it_fits_beside_the_head() -> None:
    pool = PagePool(100, 1)
    running = [run(pool, make_req(60, 8, first=100))]
    reservation = reserve(pool, running, make_req(50, 4))
    assert (reservation.start_step, reservation.extra_tokens) == (8, 45)
    assert reservation.share_of(look_up(pool, make_req(4, 40, first=300))) == 45
    assert reservation.share_of(look_up(pool, make_req(4, 41, first=300))) is None


def test_a_cached_prefix_that_a_candidate_keeps_from_eviction_is_taken_from_the_rest() -> None:
    pool = PagePool(100, 1)
    cache(pool, list(range(300, 320)))
    running = [run(pool, make_req(60, 8, first=100))]
    reservation = reserve(pool, running, make_req(50, 4))
    assert reservation.share_of(look_up(pool, make_req(24, 20, first=300))) == 45
    assert reservation.share_of(look_up(pool, make_req(24, 21, first=300))) is None


def test_a_prefix_that_two_share_comes_back_with_the_last_of_them() -> None:
    pool = PagePool(100, 1)
    cache(pool, list(range(100, 150)))
    running = [run(pool, make_req(52, left, first=100)) for left in (3, 7)]
    assert reserve(pool, running, make_req(60, 4)).start_step == 7
    assert reserve(pool, running, make_req(34, 4)).start_step == 3


def test_what_the_head_itself_has_cached_is_not_counted_as_free_for_it() -> None:
    pool = PagePool(100, 1)
    cache(pool, list(range(40)))
    running = [run(pool, make_req(30, left, first=100 * left)) for left in (5, 9)]
    reservation = reserve(pool, running, make_req(55, 4))
    assert (reservation.start_step, reservation.extra_tokens) == (5, 30 - 9 - 20)


def test_a_chunked_prompt_reserves_its_rest_before_the_head() -> None:
    pool = PagePool(100, 1)
    chunked, short = make_req(60, 5, first=100), run(pool, make_req(20, 3, first=300))
    add(make_adder(pool, chunk=8), chunked)
    adder = make_adder(pool, [short], ratio=1.0, chunk=8)
    adder.add_chunked_req(chunked)
    head = look_up(pool, make_req(70, 4))
    assert adder.forecast() is adder.forecast()
    reservation = Reservation(adder, head)
    assert reservation.start_step > 60 // 8


# ---- in the scheduler ------------------------------------------------------------------------------------------------


def blocked_harness(**options: int) -> Harness:
    """A long request runs, and one that needs its memory waits."""
    harness = Harness(num_pages=100, page_size=1, max_running_requests=32, **options)
    harness.ask("running", list(range(30)), 50)
    harness.ask("head", list(range(20, 50)), 30)
    harness.plan()
    return harness


def test_at_most_sixteen_pass_one_head() -> None:
    harness = blocked_harness()
    for i in range(30):
        harness.ask(f"small{i}", [i], 1)
    for _ in range(40):
        harness.step()
    assert harness.req("head").num_backfills == MAX_BACKFILLS == harness.state.stats.num_backfills
    assert harness.req("head").is_queued
    assert sum(f"small{i}" in harness.state.requests for i in range(30)) == 14
    harness.run()


def test_the_journal_says_who_passed_whom_and_who_had_to_wait_for_the_head() -> None:
    harness = blocked_harness()
    harness.ask("short", [1], 3)
    harness.ask("long", [2, 3], 80)
    harness.step()
    _, events = harness.state.journal.explain("short")
    assert {"past": "head"} in [event.numbers for event in events if event.what == "backfilled"]
    _, events = harness.state.journal.explain("long")
    assert [event.numbers["reason"] for event in events if event.what == "blocked"] == ["reserved for the head"]
    _, events = harness.state.journal.explain("head")
    assert [event.numbers["reason"] for event in events if event.what == "blocked"] == ["memory"]


def test_nobody_passes_a_head_that_only_waits_for_pages_of_an_ended_request() -> None:
    harness = Harness(num_pages=100, page_size=1)
    harness.ask("running", list(range(30)), 50)
    harness.ask("other", [5], 10)
    harness.plan()
    harness.ask("head", [7] * 60, 30)
    harness.ask("short", [1], 3)
    harness.abort("running")
    assert harness.state.ending
    harness.plan()
    assert harness.req("short").is_queued
    harness.answer()
    harness.plan()
    assert [new_req.rid for new_req in harness.batches[-1].new_reqs] == ["head"]


def start_step_of_head(seed: int, page_size: int, *, with_others: bool) -> tuple[int, int]:
    """After how many results the head starts, with and without others that might pass it; and how many did."""
    rng = Random(seed)
    num_slots = 192
    harness = Harness(
        num_pages=num_slots // page_size,
        page_size=page_size,
        max_running_requests=24,
        chunked_prefill_size=rng.choice([-1, 32, 64]),
        disable_overlap_schedule=rng.random() < 0.5,
        check_every=20,
    )
    for i in range(rng.randint(2, 6)):
        harness.ask(f"running{i}", random_prompt(rng, rng.randint(10, 40)), rng.randint(5, 60), ignore_eos=True)
    while harness.state.waiting_queue or harness.state.chunked_req:
        harness.step()
    harness.ask("head", random_prompt(rng, rng.randint(60, 120)), rng.randint(5, 60), ignore_eos=True)
    for i in range(30 if with_others else 0):
        length = rng.choice([1, 5, 30])
        harness.ask(f"other{i}", random_prompt(rng, length), rng.choice([1, 5, 20, 60]), ignore_eos=True)
    num_answers = 0  # a plan that finds nothing to do is no step
    while harness.req("head").is_queued:
        harness.step()
        num_answers += 1
    return num_answers, harness.req("head").num_backfills


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_with_exact_lifetimes_the_head_starts_no_later_than_without_backfilling(page_size: int) -> None:
    num_backfills = 0
    for seed in range(60):
        alone, _ = start_step_of_head(seed, page_size, with_others=False)
        together, num_passed = start_step_of_head(seed, page_size, with_others=True)
        assert together <= alone, f"seed {seed}: the head starts after {together} steps, and alone after {alone}"
        num_backfills += num_passed
    assert num_backfills > 30


def test_without_a_head_that_lacks_memory_no_reservation_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a reservation is made")

    monkeypatch.setattr(prefill, "Reservation", fail)
    harness = Harness(num_pages=100, page_size=1, max_running_requests=2)
    for i in range(6):
        harness.ask(f"r{i}", [i, 1, 2], 10)
    harness.run()
