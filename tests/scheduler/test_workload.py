"""Synthetic traces: reproducible, and with the lengths, arrivals and shared prefixes that were asked for."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from millstream.scheduler.simulation.distribution import arrival_times, parse_lengths, zipf_choices
from millstream.scheduler.simulation.token_stream import Segment, prompt_ids, token_ids
from millstream.scheduler.simulation.workload import SimulatedRequest, Workload, make_trace

VOCAB_SIZE = 32000


def requests_of(**fields: Any) -> list[SimulatedRequest]:
    """The trace of a workload; lengths as text."""
    for name in ("input_len", "output_len", "turns"):
        if isinstance(fields.get(name), str):
            fields[name] = parse_lengths(fields[name])
    defaults = {"num_requests": 500, "context_len": 10**6}
    lengths = {"input_len": parse_lengths("100"), "output_len": parse_lengths("20")}
    return make_trace(Workload(**{**defaults, **lengths, **fields})).requests


def ids(request: SimulatedRequest) -> list[int]:
    return np.frombuffer(request.input_ids(VOCAB_SIZE), np.int32).tolist()


def common_len(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


LOADS: tuple[dict[str, Any], ...] = (
    {"input_len": "exponential:50", "output_len": "lognormal:30:1"},
    {"arrival": "gamma", "arrival_cv": 3.0, "shared_prefix": 64, "priority_levels": 3},
    {"turns": "uniform:1:5", "think_seconds": 2.0, "input_len": "uniform:5:50"},
    {"tree_depth": 3, "tree_branching": 2, "tree_node_len": 32},
)


@pytest.mark.parametrize("load", LOADS)
def test_a_seed_gives_the_same_trace_again_and_another_one_another(load: dict[str, Any]) -> None:
    first, again, other = (requests_of(seed=seed, **load) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 500


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("200", 200, 0),
        ("uniform:100:300", 200, 200 / 12**0.5),
        ("exponential:200", 200, 200),
        ("lognormal:200:0.5", 200, 200 * (np.exp(0.25) - 1) ** 0.5),
    ],
)
def test_lengths_have_their_mean_and_deviation(text: str, mean: float, deviation: float) -> None:
    drawn = parse_lengths(text).sample(np.random.default_rng(3), 20000)
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.std() == pytest.approx(deviation, rel=0.05, abs=0.01)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-5", "1.5", "1e9", "nan", "uniform:5", "uniform:9:5", "normal:5:1", "lognormal:5:9", "a:b:c"],
)
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|SIGMA|LOW"):
        parse_lengths(text)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma", 2.5)])
def test_arrivals_have_their_rate_and_their_burstiness(kind: str, cv: float) -> None:
    times = arrival_times(kind, 4.0, 2.5, 40000, np.random.default_rng(5))
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_popularity_follows_zipf() -> None:
    counts = Counter(zipf_choices(10, 1.0, 50000, np.random.default_rng(7)).tolist())
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)


def test_a_stream_is_one_text_and_two_streams_are_two() -> None:
    whole, front = prompt_ids([Segment(5, 64)], VOCAB_SIZE), prompt_ids([Segment(5, 10)], VOCAB_SIZE)
    assert whole.startswith(front)
    assert prompt_ids([Segment(9, 3), Segment(5, 10)], VOCAB_SIZE).endswith(front)
    one = np.frombuffer(whole, np.int32)
    two = token_ids(np.uint64(6), np.arange(64, dtype=np.uint64), VOCAB_SIZE)
    assert (one != two).sum() > 60
    assert one.min() >= 0
    assert one.max() < VOCAB_SIZE


def test_a_next_turn_goes_on_from_prompt_and_output_of_the_last() -> None:
    requests = requests_of(turns="uniform:2:4", num_requests=60)
    followers = [request for request in requests if request.after is not None]
    assert followers
    for request in followers:
        before = requests[request.after or 0]
        output = token_ids(np.uint64(before.output_stream), np.arange(before.output_len, dtype=np.uint64), VOCAB_SIZE)
        begin = [*ids(before), *output.tolist()]
        assert ids(request)[: len(begin)] == begin
        assert request.input_len == len(ids(request)) == len(begin) + 100
        assert request.arrival is None


def test_a_conversation_ends_where_the_context_is_full() -> None:
    requests = requests_of(turns="50", context_len=1000, num_requests=100)
    assert max(request.input_len + request.output_len for request in requests) <= 1000
    assert max(request.input_len + request.output_len for request in requests) > 800


def test_first_prompts_share_a_document_and_nothing_more() -> None:
    requests = requests_of(shared_prefix=64, num_prefixes=4, num_requests=40)
    assert {request.routing_key for request in requests} == {f"prefix-{n}" for n in range(4)}
    for first, second in pairwise(requests):
        is_same = first.routing_key == second.routing_key
        assert common_len(ids(first), ids(second)) // 16 == (4 if is_same else 0)


def test_first_prompts_share_a_path_of_the_tree() -> None:
    requests = requests_of(tree_depth=3, tree_branching=2, tree_node_len=32, num_requests=60)
    shared = Counter(common_len(ids(first), ids(second)) // 32 for first, second in pairwise(requests))
    assert set(shared) == {1, 2, 3}
    assert len({request.routing_key for request in requests}) == 4
    assert all(request.input_len == 3 * 32 + 100 for request in requests)


def test_the_scheduler_is_told_a_cap_and_not_the_length() -> None:
    requests = requests_of(output_len="exponential:50")
    for request in requests:
        assert request.max_new_tokens == max(16, 2 ** int(np.log2(request.output_len) + 1))
    assert {request.max_new_tokens for request in requests} >= {16, 32, 64, 128, 256}
    assert max(request.output_len for request in requests) <= 256
    assert len({request.output_len for request in requests}) > 20
    exact = requests_of(output_len="exponential:50", ignore_eos=True)
    assert all(request.max_new_tokens == request.output_len for request in exact)
    capped = requests_of(output_len="exponential:100", max_new_tokens=7)
    assert {request.max_new_tokens for request in capped} == {7}
    assert max(request.output_len for request in capped) == 7


def test_a_closed_loop_has_no_arrivals_and_an_open_one_has_them_in_order() -> None:
    assert {request.arrival for request in requests_of(arrival="closed")} == {None}
    arrivals = [request.arrival or 0.0 for request in requests_of(arrival="poisson", request_rate=10.0)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) / arrivals[-1] == pytest.approx(10, rel=0.2)


def test_priorities_are_drawn_from_the_levels() -> None:
    assert {request.priority for request in requests_of(priority_levels=3)} == {0, 1, 2}
    assert {request.priority for request in requests_of()} == {None}
