"""Limits on waiting and on the whole: who ends when, what is told, and what it costs to watch them."""

import pytest

from millstream.common.finish_reason import FINISH_ABORT
from tests.scheduler.harness import Client, Harness


def status_of(client: Client) -> tuple[int, str]:
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    return reason.status_code, reason.err_type


def at(harness: Harness, now: float) -> None:
    harness.now = now
    harness.plan()


def test_a_request_that_waits_too_long_for_its_first_step_ends_and_one_that_runs_does_not() -> None:
    harness = Harness(max_running_requests=1, request_waiting_timeout=5.0)
    runs = harness.ask("runs", [1, 2], 500, arrival=0.0)
    harness.plan()
    waits = harness.ask("waits", [3, 4], 5, arrival=0.0)
    assert harness.scheduler.next_deadline() == 5.0
    at(harness, 4.9)
    assert not waits.ends
    at(harness, 5.0)
    assert status_of(waits) == (503, "QueueTimeout")
    assert not runs.ends
    assert harness.scheduler.next_deadline() is None


def test_a_retracted_request_has_started_and_is_not_timed_as_one_that_waits() -> None:
    harness = Harness(request_waiting_timeout=5.0)
    client = harness.ask("r", [1, 2], 30, arrival=0.0)
    harness.step()
    while harness.results:
        harness.answer()
    harness.state.retract(harness.req("r"), "retracted")
    at(harness, 100.0)
    harness.run()
    assert client.ends[0].num_tokens == 30


@pytest.mark.parametrize("is_running", [True, False])
def test_the_limit_on_the_whole_ends_a_request_wherever_it_is(*, is_running: bool) -> None:
    harness = Harness(max_running_requests=1, request_timeout=5.0)
    first = harness.ask("first", [1, 2], 500, arrival=0.0)
    harness.plan()
    second = harness.ask("second", [3, 4], 500, arrival=0.0)
    at(harness, 6.0)
    assert status_of(first if is_running else second) == (504, "RequestTimeout")
    harness.run()
    assert harness.state.pool.allocator.num_free_pages + harness.state.pool.tree_cache.evictable_pages == 64


def test_a_request_can_lower_the_limits_and_not_raise_them() -> None:
    harness = Harness(max_running_requests=1, request_waiting_timeout=5.0, request_timeout=50.0)
    harness.ask("runs", [1, 2], 500, arrival=0.0)
    harness.plan()
    patient = harness.ask("patient", [3], 5, arrival=0.0, waiting_timeout=100.0, timeout=1000.0)
    hurried = harness.ask("hurried", [4], 5, arrival=0.0, waiting_timeout=1.0)
    at(harness, 1.0)
    assert status_of(hurried) == (503, "QueueTimeout")
    at(harness, 5.0)
    assert status_of(patient) == (503, "QueueTimeout")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_limit_that_is_no_number_of_seconds_is_refused(seconds: float) -> None:
    client = Harness().ask("r", [1], 5, timeout=seconds)
    assert status_of(client)[0] == 400


def test_limits_of_requests_that_ended_are_forgotten_and_clearing_them_is_rare() -> None:
    harness = Harness(
        request_waiting_timeout=600.0, request_timeout=3600.0, max_queued_requests=2000, check_every=10**9
    )
    for index in range(1000):
        harness.ask(f"stays{index}", [1, 2], 5)
    heap = harness.scheduler.time_limits
    rebuilt, entries = 0, heap._heap
    for index in range(3000):
        harness.ask(f"goes{index}", [1, 2], 5)
        harness.abort(f"goes{index}")
        assert len(heap._heap) <= 4 * 1001 + 66
        rebuilt += heap._heap is not entries
        entries = heap._heap
    assert rebuilt <= 4
