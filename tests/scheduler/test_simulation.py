"""The simulator: what must hold of any queue, and of this scheduler on this cost model."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from millstream.common.batch_messages import ScheduleBatch
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_model import CostModel, Overheads, StepCosts, load_cost_model
from millstream.scheduler.simulation.distribution import parse_lengths
from millstream.scheduler.simulation.metrics import Measurements, Report
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.step_shape import StepShape
from millstream.scheduler.simulation.workload import SimulatedRequest, Trace, Workload, make_trace

COSTS = load_cost_model("h200")


def make_config(**fields: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {"num_pages": 20000, "page_size": 16, "context_len": 8192, "max_running_requests": 64}
    return SchedulerConfig(**{**defaults, "vocab_size": COSTS.model.vocab_size + 1, **fields})


def make_workload(**fields: Any) -> Workload:
    defaults: dict[str, Any] = {
        "num_requests": 200,
        "request_rate": 20.0,
        "input_len": parse_lengths("exponential:256"),
        "output_len": parse_lengths("exponential:32"),
        "context_len": 8192,
        "seed": 1,
    }
    return Workload(**{**defaults, **fields})


def run(trace: Trace, config: SchedulerConfig | None = None, costs: CostModel = COSTS) -> Report:
    config = config or make_config()
    measurements = Simulation(Scheduler(config), costs, 1, trace).run()
    return report_of(measurements, trace)


def report_of(measurements: Measurements, trace: Trace) -> Report:
    input_lens = np.array([request.input_len for request in trace.requests])
    return measurements.report("fcfs", input_lens, np.zeros(len(trace.requests), np.int64), 1000.0, 50.0)


class CountingScheduler(Scheduler):
    """Adds up request-seconds as a bystander would: what is inside, at every call, over the time until the next."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.request_seconds = 0.0

    def get_next_batch_to_run(self, now: float) -> ScheduleBatch | None:
        batch = super().get_next_batch_to_run(now)
        self.num_inside, self.last = len(self.state.requests), now
        return batch

    def handle(self, message: Any, now: float) -> None:
        self._count(now)
        super().handle(message, now)

    def process_batch_result(self, result: Any, now: float) -> None:
        self._count(now)
        super().process_batch_result(result, now)

    num_inside, last = 0, 0.0

    def _count(self, now: float) -> None:
        self.request_seconds += self.num_inside * (now - self.last)
        self.num_inside, self.last = len(self.state.requests), now


def test_alone_a_request_takes_what_the_cost_model_says() -> None:
    trace = make_trace(
        make_workload(
            num_requests=5,
            arrival="constant",
            request_rate=0.1,
            input_len=parse_lengths("300"),
            output_len=parse_lengths("10"),
        )
    )
    report, times, steps = run(trace), COSTS.surroundings, StepCosts(COSTS)
    turn = times.iteration_seconds + times.iteration_row_seconds + 2 * times.message_seconds
    prefill = steps.seconds(StepShape(1, 300, 300 * 301 // 2, 300, 0, 0, 1))
    ttft = times.request_seconds + times.iteration_seconds + turn + prefill + times.output_seconds
    assert report.ttft_ms.mean == pytest.approx(1000 * ttft, rel=1e-3)
    decodes = [steps.seconds(StepShape(num_decode_rows=1, num_decode_kv_tokens=n, num_samples=1)) for n in (301, 309)]
    assert 1000 * (decodes[0] + times.gap_seconds) * 0.999 <= report.tpot_ms.mean
    assert report.tpot_ms.mean <= 1000 * (decodes[1] + times.gap_seconds) * 1.001
    assert report.num_failed == report.num_retractions == report.hit_rate == 0


def test_every_request_gets_its_output_and_no_more() -> None:
    trace = make_trace(make_workload(turns=parse_lengths("uniform:1:3"), input_len=parse_lengths("uniform:1:90")))
    measurements = Simulation(Scheduler(make_config()), COSTS, 1, trace).run()
    assert measurements.num_tokens.tolist() == [request.output_len for request in trace.requests]
    assert (measurements.first > measurements.sent).all()
    assert (measurements.last >= measurements.first).all()


def test_little_law_holds() -> None:
    trace = make_trace(make_workload(num_requests=300))
    scheduler = CountingScheduler(make_config())
    measurements = Simulation(scheduler, COSTS, 1, trace).run()
    outside = COSTS.surroundings.request_seconds + COSTS.surroundings.output_seconds
    inside = (measurements.ended - measurements.sent).sum() - len(trace.requests) * outside
    assert scheduler.request_seconds == pytest.approx(inside, rel=0.03)


def test_the_same_trace_gives_the_same_report() -> None:
    trace = make_trace(make_workload(arrival="gamma", arrival_cv=3.0))
    assert run(trace) == run(trace)


def test_more_load_means_later_tokens() -> None:
    reports = [run(make_trace(make_workload(num_requests=250, request_rate=rate))) for rate in (5.0, 60.0, 400.0)]
    ttfts, tpots = ([getattr(report, name).mean for report in reports] for name in ("ttft_ms", "tpot_ms"))
    assert ttfts == sorted(ttfts)
    assert ttfts[2] > 3 * ttfts[0]
    assert tpots == sorted(tpots)
    assert reports[0].goodput_share == 1 > reports[2].goodput_share


def test_bursts_wait_longer_than_a_steady_stream() -> None:
    steady, bursty = (
        run(make_trace(make_workload(arrival=kind, arrival_cv=4.0, request_rate=40.0)))
        for kind in ("constant", "gamma")
    )
    assert bursty.ttft_ms.p99 > 1.5 * steady.ttft_ms.p99


def test_overlap_hides_what_a_step_costs_outside_the_worker() -> None:
    trace = make_trace(make_workload())
    overlapped, alone = (
        run(trace, make_config(disable_overlap_schedule=disabled)).tpot_ms.p50 for disabled in (False, True)
    )
    assert alone - overlapped > 1000 * COSTS.surroundings.iteration_seconds


def test_the_next_turn_hits_prompt_and_output_of_the_last() -> None:
    workload = make_workload(
        turns=parse_lengths("4"),
        think_seconds=1.0,
        input_len=parse_lengths("64"),
        output_len=parse_lengths("64"),
        num_requests=80,
    )
    # Turns 2, 3, 4 find (128, 256, 384) minus what lacks a page: the last output has no KV.
    assert run(make_trace(workload)).hit_rate == pytest.approx((112 + 240 + 368) / (64 + 192 + 320 + 448), abs=0.001)
    assert run(make_trace(workload), make_config(disable_radix_cache=True)).hit_rate == 0


def test_a_small_cache_retracts_and_still_answers_all() -> None:
    workload = make_workload(
        request_rate=200.0, input_len=parse_lengths("64"), output_len=parse_lengths("200"), num_requests=60
    )
    report = run(make_trace(workload), make_config(num_pages=200, schedule_conservativeness=0.1))
    assert report.num_retractions > 0
    assert report.num_failed == 0


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    workload = make_workload(arrival="closed", num_users=4, num_requests=60)
    measurements = Simulation(Scheduler(make_config()), COSTS, 1, make_trace(workload)).run()
    events = sorted([*((sent, 1) for sent in measurements.sent), *((end, -1) for end in measurements.ended)])
    assert np.cumsum([change for _, change in events]).max() == 4
    assert (measurements.sent == 0).sum() == 4


def test_users_think_before_they_ask_again() -> None:
    fast, slow = (
        run(make_trace(make_workload(arrival="closed", num_users=4, think_seconds=think, num_requests=60))).seconds
        for think in (0.0, 5.0)
    )
    assert slow > fast + 30


def test_a_waiting_limit_ends_requests_in_virtual_time() -> None:
    workload = make_workload(
        request_rate=500.0, output_len=parse_lengths("400"), input_len=parse_lengths("16"), num_requests=60
    )
    trace = make_trace(workload)
    config = make_config(max_running_requests=4, request_waiting_timeout=0.5)
    measurements = Simulation(Scheduler(config), COSTS, 1, trace).run()
    late = measurements.status == 503
    assert late.sum() > 30
    waited = (measurements.ended - measurements.sent)[late]
    assert waited.min() >= 0.5
    assert waited.max() < 0.6
    assert report_of(measurements, trace).num_failed == late.sum()


def test_a_limit_is_due_while_nothing_else_happens() -> None:
    slow = msgspec.structs.replace(COSTS, overheads=Overheads(5.0, 0.0, 0.0))
    trace = make_trace(make_workload(num_requests=1))
    measurements = Simulation(Scheduler(make_config(request_timeout=1.0)), slow, 1, trace).run()
    outside = COSTS.surroundings.iteration_seconds + COSTS.surroundings.output_seconds
    assert measurements.status.tolist() == [504]
    assert measurements.ended - measurements.sent == pytest.approx([1.0 + outside])


def test_a_full_queue_refuses() -> None:
    workload = make_workload(request_rate=5000.0, num_requests=100)
    report = run(make_trace(workload), make_config(max_running_requests=2, max_queued_requests=10))
    assert report.num_failed > 50
    assert (report.first_error or "").startswith("429")
    assert math.isfinite(report.ttft_ms.p99)


def test_recorded_outputs_are_given_back_and_hit_in_the_next_turn() -> None:
    prompt, output = np.arange(1, 33, dtype=np.int32), np.arange(100, 132, dtype=np.int32)
    turns = [
        SimulatedRequest(
            prompt=prompt.tobytes(),
            input_len=32,
            output_len=32,
            max_new_tokens=64,
            arrival=0.0,
            output_ids=output.tobytes(),
        ),
        SimulatedRequest(
            prompt=np.concatenate((prompt, output, prompt)).tobytes(),
            input_len=96,
            output_len=5,
            max_new_tokens=64,
            arrival=10.0,
        ),
    ]
    assert run(Trace(turns)).hit_rate == pytest.approx(48 / 128)


def test_the_longest_prefix_first_hits_more_than_the_first_come() -> None:
    workload = make_workload(
        num_requests=300,
        request_rate=300.0,
        shared_prefix=1024,
        num_prefixes=24,
        prefix_zipf=0.0,
        input_len=parse_lengths("32"),
        output_len=parse_lengths("16"),
    )
    trace = make_trace(workload)
    fcfs, lpm = (
        run(trace, make_config(num_pages=640, max_running_requests=8, schedule_policy=policy)).hit_rate
        for policy in ("fcfs", "lpm")
    )
    assert lpm > fcfs + 0.1
