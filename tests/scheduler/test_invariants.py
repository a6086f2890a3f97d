"""Every fault that is made by hand is named; when idle it is counted, logged and healed, and the server goes on."""

import logging
import time
from array import array
from collections.abc import Callable
from random import Random

import pytest

from millstream.common.finish_reason import FINISH_LENGTH
from millstream.scheduler.invariants import MAX_PROBLEMS, broken_invariants, check_when_idle
from millstream.scheduler.req import Req
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.scheduler_state import SchedulerState
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

Fault = Callable[[SchedulerState], object]


def busy() -> Harness:
    """One request runs with a step in flight, one is computed in chunks, two wait, and a prefix is cached."""
    harness = Harness(num_pages=64, page_size=4, max_running_requests=2, chunked_prefill_size=16)
    harness.ask("cached", [9] * 12, 2)
    harness.run()
    harness.ask("running", [1] * 8, 20)
    harness.step()
    harness.ask("chunked", [2] * 60, 5)
    harness.ask("first", [3] * 8, 5)
    harness.ask("second", [4] * 8, 5)
    harness.step()
    harness.plan()
    state = harness.state
    assert state.in_flight
    assert state.chunked_req is state.requests["chunked"]
    assert len(state.waiting_queue) == 2
    return harness


def idle() -> Harness:
    """Nothing runs; two prefixes are cached, and rows are still to be told to be freed."""
    harness = Harness(num_pages=64, page_size=4, max_running_requests=2, chunked_prefill_size=16)
    harness.ask("a", [1] * 12, 5)
    harness.ask("b", [2] * 12, 5)
    harness.run()
    return harness


def req(state: SchedulerState, rid: str = "running") -> Req:
    return state.requests[rid]


def add_to(holder: object, name: str, change: float) -> None:
    setattr(holder, name, getattr(holder, name) + change)


BUSY_FAULTS: dict[str, tuple[Fault, str]] = {
    "a page is lost": (lambda s: s.pool.allocator._free_page_ids.pop(), "has 0 owners"),
    "a page of a request is free as well": (
        lambda s: s.pool.allocator._free_page_ids.append(req(s).page_ids[-1]),
        "has 2 owners",
    ),
    "a page is in two tables": (lambda s: req(s).page_ids.append(req(s, "chunked").page_ids[-1]), "has 2 owners"),
    "a page is in the tree and free": (
        lambda s: next(s.pool.tree_cache.nodes()).page_ids.append(s.pool.allocator._free_page_ids[0]),
        "has 2 owners",
    ),
    "a page does not exist": (lambda s: s.pool.allocator._free_page_ids.append(64), "page 64 does not exist"),
    "a page is freed twice": (
        lambda s: s.pool.allocator.free(s.pool.allocator.free_page_ids[:1]),
        "pages were freed twice, 1 times",
    ),
    "a prefix is unlocked twice": (
        lambda s: s.pool.tree_cache.dec_lock_ref(req(s).last_node or s.pool.tree_cache.root),
        "has lock_ref 0, and 1 requests use it",
    ),
    "a prefix is locked twice": (
        lambda s: s.pool.tree_cache.inc_lock_ref(req(s).last_node or s.pool.tree_cache.root),
        "has lock_ref 2, and 1 requests use it",
    ),
    "a leaf is forgotten by eviction": (
        lambda s: [setattr(node, "heap_key", None) for node in s.pool.tree_cache.nodes()],
        "not in the eviction heap",
    ),
    "evictable pages are miscounted": (lambda s: add_to(s.pool.tree_cache, "evictable_pages", -9), "tree sizes are"),
    "the available pages are negative": (
        lambda s: add_to(s.pool.tree_cache, "evictable_pages", -90),
        "of 64 pages are available",
    ),
    "a run has lost a page": (
        lambda s: next(node for node in s.pool.tree_cache.nodes() if node.lock_ref == 0).page_ids.pop(),
        "different lengths",
    ),
    "a node hangs under another name": (
        lambda s: setattr(next(s.pool.tree_cache.nodes()), "edge", b"other"),
        "not its parent's child",
    ),
    "a request's pages are not those of its prefix": (
        lambda s: req(s).page_ids.reverse(),
        "does not begin with the pages of its tree path",
    ),
    "a row is lost": (lambda s: s.requests.pop("running"), "rows are lost"),
    "a row is free and in use": (lambda s: s.free_rows.append(req(s).row), "rows are lost, or have two owners"),
    "a request is filed under another row": (
        lambda s: s.running_batch.update({7: s.running_batch.pop(req(s).row)}),
        "filed under another row",
    ),
    "the workers keep a row": (lambda s: s.worker_rows.add(9), "the workers hold rows"),
    "a request is in two places": (lambda s: s.waiting_queue.add(req(s), 0), "is RUNNING and in waiting"),
    "a request is in no place": (lambda s: s.running_batch.clear(), "4 requests are in 3 places"),
    "an ended request is still known": (lambda s: s.ending.update(a=req(s)), "is RUNNING and in ending"),
    "a request has left prefilling too early": (lambda s: s.prefilling.clear(), "count as prefilling"),
    "a waiting request has a row": (lambda s: setattr(req(s, "first"), "row", 1), "waits, and holds row 1"),
    "the queue is out of order": (lambda s: setattr(req(s, "first"), "arrival", 99.0), "behind one that came later"),
    "queued tokens are miscounted": (lambda s: add_to(s.waiting_queue, "num_tokens", -20), "the queue counts -4"),
    "a step in flight is forgotten": (lambda s: s.in_flight.clear(), "outputs are left to plan, not"),
    "a request forgets its last step": (lambda s: setattr(req(s, "running"), "last_step", -1), "is its last one, not"),
    "a step is missing": (lambda s: add_to(s, "next_step", 1), "are in flight, and"),
    "too many steps are in flight": (lambda s: s.in_flight.append(s.in_flight[0]), "3 steps are in flight"),
    "a request has fewer outputs left than none": (
        lambda s: setattr(req(s), "num_left_to_plan", -1),
        "-1 outputs are left to plan",
    ),
    "a step is planned past max_new_tokens": (
        lambda s: setattr(req(s), "max_new_tokens", 2),
        "outputs are left to plan",
    ),
    "a request has committed more than it has": (
        lambda s: add_to(req(s), "kv_committed_len", 50),
        "its cache lengths are out of order",
    ),
    "a slot is planned twice": (lambda s: add_to(req(s), "kv_allocated_len", 1), "slots are planned for"),
    "a table is longer than its slots": (lambda s: add_to(req(s), "num_slots", 4), "its page table holds"),
    "a page was not sent": (lambda s: add_to(req(s), "num_sent_pages", -1), "the workers know"),
    "a chunk ends within a page": (lambda s: add_to(req(s, "chunked"), "kv_allocated_len", -1), "its chunks end at"),
    "the new token ratio is negative": (lambda s: setattr(s.new_token_ratio, "value", -0.1), "new_token_ratio is -0.1"),
    "the journal grows": (lambda s: setattr(s.journal, "max_requests", -1), "the journal holds"),
}


@pytest.mark.parametrize("fault", BUSY_FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    make, expected = BUSY_FAULTS[fault]
    state = busy().state
    assert broken_invariants(state) == []
    make(state)
    assert any(expected in problem for problem in broken_invariants(state)), broken_invariants(state)


def test_a_request_of_an_unknown_step_is_named() -> None:
    state = busy().state
    del state.requests["running"]
    assert any(problem == "request running is in flight, and unknown" for problem in broken_invariants(state))


def test_a_waiting_request_that_the_tree_forgot_is_named() -> None:
    harness = Harness(schedule_policy="lpm")
    harness.ask("a", [1] * 8)
    harness.state.pool.tree_cache.root.num_waiting = 0
    assert broken_invariants(harness.state) == ["0 requests wait at tree nodes, not 1"]


def test_a_flood_of_faults_is_told_in_part() -> None:
    harness = Harness(num_pages=1000)
    harness.state.pool.allocator._free_page_ids.clear()
    assert len(broken_invariants(harness.state)) == MAX_PROBLEMS


IDLE_FAULTS: dict[str, Fault] = {
    "a page is lost": lambda s: s.pool.allocator._free_page_ids.pop(),
    "all pages are lost": lambda s: s.pool.allocator._free_page_ids.clear(),
    "a page is free twice": lambda s: s.pool.allocator._free_page_ids.append(s.pool.allocator._free_page_ids[0]),
    "a page has two runs": lambda s: next(s.pool.tree_cache.nodes()).page_ids.append(
        s.pool.allocator._free_page_ids[0]
    ),
    "a prefix stays locked": lambda s: s.pool.tree_cache.inc_lock_ref(next(s.pool.tree_cache.nodes())),
    "a leaf is forgotten by eviction": lambda s: setattr(next(s.pool.tree_cache.nodes()), "heap_key", None),
    "the tree cannot be walked": lambda s: setattr(s.pool.tree_cache.root, "children", None),
    "the tree is a circle": lambda s: next(s.pool.tree_cache.nodes()).children.update(
        x=next(s.pool.tree_cache.nodes())
    ),
    "a row is lost that the workers hold": lambda s: s.freed_rows.remove(s.free_rows.pop()),
    "a row is lost that will be freed": lambda s: s.free_rows.pop(),
    "a row is free twice": lambda s: s.free_rows.append(s.free_rows[0]),
    "a freed row is not told": lambda s: s.freed_rows.pop(),
    "a row is freed twice": lambda s: s.freed_rows.append(s.freed_rows[0]),
    "queued tokens are miscounted": lambda s: add_to(s.waiting_queue, "num_tokens", 8),
    "a request that ended still waits": lambda s: s.waiting_queue.add(ended_req(), 0),
    "a request that ended still runs": lambda s: s.running_batch.update({0: ended_req()}),
    "a request that ended is still ending": lambda s: s.ending.update(a=ended_req()),
    "a request that ended is still the chunked one": lambda s: setattr(s, "chunked_req", ended_req()),
    "a request that ended is still prefilling": lambda s: s.prefilling.update(a=ended_req()),
    "the new token ratio is negative": lambda s: setattr(s.new_token_ratio, "value", -0.1),
}


def ended_req() -> Req:
    harness = Harness()
    harness.ask("old", [1], 1)
    return harness.req("old")


@pytest.mark.parametrize("fault", IDLE_FAULTS)
def test_a_fault_of_an_idle_scheduler_is_counted_logged_and_healed(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness = idle()
    IDLE_FAULTS[fault](harness.state)
    with caplog.at_level(logging.ERROR):
        harness.scheduler.check_when_idle()
    num_broken = harness.scheduler.take_snapshot(0.0).broken_invariants_total
    assert num_broken == sum("broken invariant" in line for line in caplog.messages) > 0
    assert broken_invariants(harness.state) == []
    for index in range(4):
        client = harness.ask(f"later{index}", [index] * 30, 20)
        harness.step()
    harness.run()
    assert client.ends[0].finish_reason == FINISH_LENGTH(20)
    assert client.output_ids == reference_outputs([3] * 30, VOCAB_SIZE, 20)
    harness.scheduler.check_when_idle()
    assert harness.scheduler.take_snapshot(0.0).broken_invariants_total == num_broken


def test_a_sound_scheduler_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    harness = idle()
    pool = harness.state.pool
    harness.scheduler.check_when_idle()
    assert harness.state.pool is pool
    assert pool.tree_cache.evictable_pages > 0
    assert not caplog.messages


def test_a_busy_scheduler_is_not_checked() -> None:
    harness = busy()
    harness.state.free_rows.append(0)
    harness.scheduler.check_when_idle()
    assert harness.state.stats.num_broken_invariants == 0


def state_with_runs(num_pages: int, pages_per_run: int) -> SchedulerState:
    """Nothing runs, and the tree holds all pages in runs of so many."""
    config = SchedulerConfig(
        num_pages=num_pages, page_size=16, vocab_size=50_000, context_len=8192, max_running_requests=256
    )
    state, rng = SchedulerState(config), Random(0)
    pool = state.pool
    for _ in range(num_pages // pages_per_run):
        page_ids = pool.alloc(pages_per_run)
        assert page_ids
        token_ids = array("i", [rng.randrange(50_000) for _ in range(16 * pages_per_run)])
        pool.tree_cache.insert(pool.tree_cache.root, (None, None), token_ids.tobytes(), page_ids)
    return state


def test_a_million_cached_tokens_are_checked_in_a_blink() -> None:
    """62,500 pages: some 35 ms where each is a run of its own; the server answers nobody meanwhile."""
    state = state_with_runs(62_500, 1)
    start = time.process_time()
    check_when_idle(state)
    assert time.process_time() - start < 0.15  # three times the bound of a quiet machine
    assert state.stats.num_broken_invariants == 0
