"""Steps that do not come back, and when snapshots are due."""

import pytest

from millstream.scheduler.load import SnapshotClock
from millstream.scheduler.watchdog import StepTimeout, Watchdog


def test_a_step_that_lasts_too_long_names_the_ranks_that_hold_it_up() -> None:
    watchdog = Watchdog(tp_size=3, timeout_seconds=10.0)
    watchdog.on_sent(7, now=0.0)
    watchdog.on_ack(1, 7, now=1.0)
    watchdog.check(10.0)
    with pytest.raises(StepTimeout, match=r"step 7 .* rank 0, 2 has not acknowledged"):
        watchdog.check(10.1)


def test_acknowledged_by_all_but_without_a_result_is_late_too() -> None:
    watchdog = Watchdog(tp_size=1, timeout_seconds=10.0)
    watchdog.on_sent(0, now=0.0)
    watchdog.on_ack(0, 0, now=1.0)
    with pytest.raises(StepTimeout, match="has not sent its result"):
        watchdog.check(11.0)


def test_a_step_that_computes_nothing_needs_no_result() -> None:
    watchdog = Watchdog(tp_size=1, timeout_seconds=10.0)
    watchdog.on_sent(0, now=0.0, has_result=False)
    watchdog.on_ack(0, 0, now=1.0)
    watchdog.check(100.0)


def test_a_rank_may_be_late_only_as_long_as_the_timeout_even_when_the_result_is_there() -> None:
    watchdog = Watchdog(tp_size=2, timeout_seconds=10.0)
    watchdog.on_sent(0, now=0.0)
    watchdog.on_result(0, now=1.0)
    watchdog.on_ack(0, 0, now=1.0)
    with pytest.raises(StepTimeout, match="rank 1"):
        watchdog.check(10.5)


def test_the_time_of_a_step_behind_another_begins_when_that_one_ends() -> None:
    watchdog = Watchdog(tp_size=1, timeout_seconds=10.0)
    watchdog.on_sent(0, now=0.0)
    watchdog.on_sent(1, now=0.0)
    watchdog.on_result(0, now=9.0)
    watchdog.on_ack(0, 0, now=9.0)
    watchdog.check(18.0)
    with pytest.raises(StepTimeout, match="step 1"):
        watchdog.check(19.5)


def test_a_link_that_stays_full_ends_the_server() -> None:
    watchdog = Watchdog(tp_size=1, timeout_seconds=10.0)
    watchdog.check(1.0, is_full=True)
    watchdog.check(5.0, is_full=False)
    watchdog.check(6.0, is_full=True)
    watchdog.check(16.0, is_full=True)
    with pytest.raises(StepTimeout, match="full"):
        watchdog.check(16.5, is_full=True)


def test_nothing_in_flight_is_never_late() -> None:
    Watchdog(tp_size=1, timeout_seconds=1.0).check(1e9)


def test_snapshots_come_every_second_when_idle_and_every_tenth_when_something_happens() -> None:
    clock = SnapshotClock(now=0.0)
    assert clock.seconds_left(0.0) == 0.0
    clock.on_sent(0.0)
    assert clock.seconds_left(0.25) == 0.75
    clock.on_news()
    assert clock.seconds_left(0.05) == pytest.approx(0.05)
    assert clock.seconds_left(0.2) == 0.0
    clock.on_sent(0.2)
    assert clock.seconds_left(0.2) == 1.0
