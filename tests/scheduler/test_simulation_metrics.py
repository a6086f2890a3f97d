"""What a report says of outputs whose times are known."""

import numpy as np
import pytest

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FinishReason
from millstream.common.messages import pack_int32
from millstream.common.text_messages import BatchTokenIDOutput, RequestEnd, RequestStats
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.metrics import Measurements, Report, spread

STATS = RequestStats(prompt_tokens=10, cached_tokens=0, num_retractions=0)
DONE = FINISH_LENGTH(1)


def output(tokens: dict[int, int], ends: dict[int, FinishReason] | None = None) -> BatchTokenIDOutput:
    """`tokens` are the numbers of new tokens by request."""
    zeros = pack_int32([0] * len(tokens))
    return BatchTokenIDOutput(
        starts=[],
        rids=[str(index) for index in tokens],
        generations=zeros,
        cached_tokens=zeros,
        num_tokens=pack_int32(tokens.values()),
        token_ids=pack_int32([0] * sum(tokens.values())),
        ends=[RequestEnd(str(index), reason, 0, STATS) for index, reason in (ends or {}).items()],
    )


def measured() -> Measurements:
    """Request 0: TTFT 0.5 s, TPOT 0.1 s; 1: TTFT 2 s, one token; 2: TTFT 0.5 s, TPOT 0.5 s; 3 is refused."""
    measurements = Measurements(4)
    measurements.sent[:] = (0.0, 0.0, 1.0, 1.0)
    assert measurements.on_output(output({0: 1}), 0.5) == []
    measurements.on_output(output({0: 2}), 0.7)
    assert measurements.on_output(output({0: 2}, {0: DONE}), 0.9) == [0]
    assert measurements.on_output(output({}, {3: FINISH_ABORT("full", 429, "")}), 1.0) == [3]
    measurements.on_output(output({2: 1}), 1.5)
    assert measurements.num_open == 2
    assert measurements.on_output(output({1: 1, 2: 1}, {1: DONE, 2: DONE}), 2.0) == [1, 2]
    config = SchedulerConfig(num_pages=4, page_size=4, vocab_size=9, context_len=9, max_running_requests=1)
    measurements.on_snapshot(Scheduler(config).take_snapshot(2.0))
    return measurements


def report(ttft_target_ms: float, tpot_target_ms: float) -> Report:
    input_lens, priorities = np.array([10, 10, 10, 99]), np.array([0, 0, 1, 1])
    return measured().report("fcfs", input_lens, priorities, ttft_target_ms, tpot_target_ms)


def test_times_and_rates_are_those_of_the_requests_that_succeeded() -> None:
    found = report(1000, 200)
    assert (found.num_requests, found.num_failed, found.first_error) == (4, 1, "429: full")
    assert found.seconds == 2.0
    assert found.ttft_ms.mean == pytest.approx(1000, rel=1e-3)
    assert found.ttft_ms.p50 == pytest.approx(500)
    assert found.tpot_ms.mean == pytest.approx((100 + 500) / 2)
    assert found.itl_ms.mean == pytest.approx((200 + 200 + 500) / 3, rel=1e-5)
    assert found.e2e_ms.mean == pytest.approx((900 + 2000 + 1000) / 3, abs=0.01)
    assert found.requests_per_s == 1.5
    assert found.output_tokens_per_s == (5 + 1 + 2) / 2
    assert found.total_tokens_per_s == (8 + 30) / 2
    assert found.ttft_ms_by_priority[1].mean == pytest.approx(500)


@pytest.mark.parametrize(
    ("ttft_target_ms", "tpot_target_ms", "num_good"),
    [(1000, 200, 1), (1000, 600, 2), (3000, 200, 2), (3000, 600, 3), (100, 600, 0), (3000, 0, 1), (500, 100.001, 1)],
)
def test_goodput_counts_who_met_both_targets(ttft_target_ms: float, tpot_target_ms: float, num_good: int) -> None:
    found = report(ttft_target_ms, tpot_target_ms)
    assert found.goodput_per_s == num_good / 2
    assert found.goodput_share == num_good / 4


def test_a_spread_is_in_milliseconds_and_that_of_nothing_is_zero() -> None:
    found = spread(np.arange(101) / 1000)
    assert (found.mean, found.p50, found.p90, found.p99) == (50, 50, 90, 99)
    assert spread(np.zeros(0)).p99 == 0
