"""What clients see of automatic chunks: the whole scheduler on simulated workers whose times are noisy."""

import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from millstream.common.batch_messages import BatchResult
from millstream.common.config import AUTO_CHUNK
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_model import CostModel, Efficiency, StepCosts, load_cost_model
from millstream.scheduler.simulation.metrics import Report
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.step_shape import StepShape
from millstream.scheduler.simulation.token_stream import Segment
from millstream.scheduler.simulation.workload import SimulatedRequest, Trace

BF16 = load_cost_model("smollm2_cpu")
FASTER = msgspec.structs.replace(BF16, linear=Efficiency(2 * BF16.linear.bytes, 2 * BF16.linear.flops))
NUM_STREAMS = 8
LONG_PROMPT_LEN = 4096


class NoisyCosts(StepCosts):
    """Steps take up to a fifth longer, and one in a hundred up to twice as long; from `slow_from` on all twice as long."""

    def __init__(self, costs: CostModel, slow_from: int | None = None) -> None:
        super().__init__(costs)
        self.rng = random.Random(0)
        self.slow_from = slow_from
        self.num_steps = 0

    def seconds(self, shape: StepShape) -> float:
        self.num_steps += 1
        seconds = super().seconds(shape) * (1 + 0.2 * self.rng.random() ** 2)
        if self.rng.random() < 0.01:
            seconds *= self.rng.uniform(1, 2)
        return seconds * 2 if self.slow_from is not None and self.num_steps >= self.slow_from else seconds


class WatchedScheduler(Scheduler):
    """Keeps when each step's result came, and how many prompt tokens it had beside streams."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.steps: list[tuple[float, int, int]] = []

    def process_batch_result(self, result: BatchResult, now: float) -> None:
        work = self.state.in_flight[0].work
        self.steps.append((now, work.num_prefill_tokens, work.num_decodes))
        super().process_batch_result(result, now)

    def gaps(self, num_decodes: int, *, with_prompts: bool) -> list[float]:
        """Seconds from each step to the one before, of those with so many streams."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [
            now - before
            for (before, _, _), (now, tokens, decodes) in pairs
            if decodes == num_decodes and (tokens > 0) == with_prompts
        ]


def make_config(chunked_prefill_size: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=4000,
        page_size=16,
        vocab_size=BF16.model.vocab_size + 1,
        context_len=8192,
        max_running_requests=64,
        chunked_prefill_size=chunked_prefill_size,
    )


def make_request(number: int, input_len: int, output_len: int, arrival: float | None) -> SimulatedRequest:
    return SimulatedRequest(
        prompt=(Segment(2 * number, input_len),),
        input_len=input_len,
        output_len=output_len,
        max_new_tokens=output_len,
        ignore_eos=True,
        arrival=arrival,
        output_stream=2 * number + 1,
    )


def run_long_prompt(costs: CostModel, before: Iterable[int] = (), slow_from: int | None = None) -> WatchedScheduler:
    """Prompts of the lengths `before` alone, then eight streams, and beside them a prompt of 4,096 tokens."""
    requests = [make_request(number, input_len, 8, 3.0 * number) for number, input_len in enumerate(before)]
    start = 3.0 * len(requests)
    requests += [make_request(100 + number, 100, 500, start + 0.01 * number) for number in range(NUM_STREAMS)]
    requests.append(make_request(200, LONG_PROMPT_LEN, 4, start + 1.5))
    scheduler = WatchedScheduler(make_config(AUTO_CHUNK))
    Simulation(scheduler, costs, 1, Trace(requests), NoisyCosts(costs, slow_from)).run()
    return scheduler


def run_closed(costs: CostModel, chunked_prefill_size: int, concurrency: int) -> Report:
    """Users who each send prompts of about 256 tokens for 128, one after another."""
    rng = random.Random(concurrency)
    requests = [make_request(number, rng.randint(264, 280), 128, None) for number in range(3 * concurrency)]
    scheduler = Scheduler(make_config(chunked_prefill_size))
    measurements = Simulation(scheduler, costs, 1, Trace(requests, concurrency), NoisyCosts(costs)).run()
    input_lens = np.array([request.input_len for request in requests])
    return measurements.report("fcfs", input_lens, np.zeros_like(input_lens), 1000.0, 50.0)


@pytest.mark.parametrize("costs", [BF16, FASTER])
@pytest.mark.parametrize("before", [(), (5,), (256, 256)])
def test_streams_beside_a_long_prompt_wait_at_most_five_times_as_long_as_usual(
    costs: CostModel, before: tuple[int, ...]
) -> None:
    scheduler = run_long_prompt(costs, before)
    usual, beside = (scheduler.gaps(NUM_STREAMS, with_prompts=with_prompts) for with_prompts in (False, True))
    assert len(beside) > 20
    assert np.percentile(beside, 99) < 5 * np.median(usual)


def test_so_do_they_soon_after_the_machine_became_half_as_fast() -> None:
    scheduler = run_long_prompt(BF16, (256,), slow_from=150)
    usual, beside = (scheduler.gaps(NUM_STREAMS, with_prompts=with_prompts)[-40:] for with_prompts in (False, True))
    assert np.median(beside) < 5 * np.median(usual)


def test_the_long_prompt_has_more_than_half_of_the_machine() -> None:
    scheduler = run_long_prompt(BF16, (256,))
    usual, beside = (scheduler.gaps(NUM_STREAMS, with_prompts=with_prompts) for with_prompts in (False, True))
    assert sum(beside) - len(beside) * np.median(usual) > 0.5 * sum(beside)


@pytest.mark.parametrize("costs", [BF16, FASTER])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_users_get_as_many_tokens_as_with_large_chunks_and_the_first_ones_not_much_later(
    costs: CostModel, concurrency: int
) -> None:
    auto, large = (run_closed(costs, size, concurrency) for size in (AUTO_CHUNK, 512))
    assert auto.output_tokens_per_s > 0.97 * large.output_tokens_per_s
    assert auto.ttft_ms.p50 < (2.0 if concurrency == 32 else 1.1) * large.ttft_ms.p50
    assert auto.itl_ms.p99 < 1.05 * large.itl_ms.p99
