"""Traces from files: JSON lines of lengths, blocks that prompts share, and recordings of a scheduler."""

from pathlib import Path

import numpy as np
import pytest

from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import TextEnded
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.scheduler.simulation.cost_model import load_cost_model
from millstream.scheduler.simulation.distribution import parse_lengths
from millstream.scheduler.simulation.simulation import Simulation
from millstream.scheduler.simulation.trace_file import TraceError, read_trace
from millstream.scheduler.simulation.workload import Trace, Workload, make_trace
from tests.scheduler.test_workload import common_len, ids

COSTS = load_cost_model("smollm2_cpu")
VOCAB_SIZE = COSTS.model.vocab_size


def read(path: Path, *, max_new_tokens: int | None = None, ignore_eos: bool = False) -> Trace:
    return read_trace(path, vocab_size=VOCAB_SIZE, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, block_len=16)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_lines_become_requests_in_order_of_arrival_from_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"arrival": 7.5, "input_length": 30, "output_length": 4, "user": "ignored"}',
        "",
        '{"timestamp": 5000, "input_length": 20, "output_length": 9}',
    )
    first, second = read(path).requests
    assert (first.arrival, first.input_len, first.output_len, first.max_new_tokens) == (0.0, 20, 9, 9)
    assert (second.arrival, second.input_len, second.output_len, second.max_new_tokens) == (2.5, 30, 4, 9)
    assert len(ids(first)) == 20
    assert common_len(ids(first), ids(second)) < 16
    assert [each.max_new_tokens for each in read(path, ignore_eos=True).requests] == [9, 4]
    assert [each.output_len for each in read(path, max_new_tokens=5).requests] == [5, 4]


def test_hash_ids_are_shared_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"arrival": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}',
        '{"arrival": 1, "input_length": 50, "output_length": 1, "hash_ids": [1, 2, 9, 3]}',
        '{"arrival": 2, "input_length": 64, "output_length": 1, "hash_ids": [7]}',
    )
    first, second, third = (ids(request) for request in read(path).requests)
    assert [len(first), len(second), len(third)] == [40, 50, 64]
    assert common_len(first, second) // 16 == 2
    assert common_len(first, third) < 16


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"arrival": 1, "input_length": 0, "output_length": 4}', "input_length"),
        ('{"arrival": 1, "input_length": 4, "output_length": 10000000}', "output_length"),
        ('{"input_length": 4, "output_length": 4}', "arrival"),
        ('{"arrival": 1e300, "input_length": 4, "output_length": 4}', "arrival"),
        ('{"arrival": 0, "input_length": "4", "output_length": 4}', r"input_length"),
        ('{"arrival": 0, "input_length": 4, "output_length": 4, "hash_ids": [-1]}', "hash_ids"),
        ("not json", "malformed"),
    ],
)
def test_a_wrong_line_is_named(line: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"arrival": 0, "input_length": 1, "output_length": 1}', line)
    with pytest.raises(TraceError, match=f"line 2: .*{text}") as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "missing")
    with pytest.raises(TraceError, match="no request"):
        read(write(tmp_path, ""))


def recorded(path: Path, trace: Trace) -> None:
    """Simulate a trace, and record what the scheduler does."""
    config = SchedulerConfig(
        num_pages=2000, page_size=16, vocab_size=VOCAB_SIZE + 1, context_len=8192, max_running_requests=32
    )
    scheduler = RecordedScheduler(config, ScheduleRecorder(path, config))
    Simulation(scheduler, COSTS, 1, trace).run()
    scheduler.recorder.close()


def test_a_recording_gives_arrivals_prompts_and_outputs(tmp_path: Path) -> None:
    lengths = {"input_len": parse_lengths("exponential:40"), "output_len": parse_lengths("exponential:9")}
    trace = make_trace(Workload(num_requests=30, request_rate=10.0, context_len=8192, **lengths))
    recorded(tmp_path / "recording", trace)
    found = read(tmp_path / "recording")
    start = trace.requests[0].arrival or 0.0
    for request, again in zip(trace.requests, found.requests, strict=True):
        assert again.arrival == pytest.approx((request.arrival or 0.0) - start, abs=1e-6)
        assert again.input_ids(VOCAB_SIZE) == request.input_ids(VOCAB_SIZE)
        assert (again.output_len, again.max_new_tokens) == (request.output_len, request.max_new_tokens)
        assert len(again.output_ids) == 4 * request.output_len


def test_a_text_end_shortens_a_recorded_output_and_requests_without_output_are_left_out(tmp_path: Path) -> None:
    config = SchedulerConfig(
        num_pages=100, page_size=16, vocab_size=VOCAB_SIZE + 1, context_len=8192, max_running_requests=8
    )
    path = tmp_path / "recording"
    scheduler = RecordedScheduler(config, ScheduleRecorder(path, config))
    trace = make_trace(
        Workload(num_requests=1, input_len=parse_lengths("20"), output_len=parse_lengths("6"), context_len=100)
    )
    Simulation(scheduler, COSTS, 1, trace).run()
    scheduler.handle(TextEnded("0", 0, 2), 100.0)
    params = SamplingParams(max_new_tokens=3, seed=0)
    scheduler.handle(TokenizedGenerateReqInput("refused", "http", 100.0, pack_int32(range(9000)), params), 100.0)
    scheduler.take_output()
    scheduler.recorder.close()
    (request,) = read(path).requests
    assert (request.input_len, request.output_len) == (20, 2)
    assert len(np.frombuffer(request.output_ids, np.int32)) == 2


def test_a_recording_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    lengths = {"input_len": parse_lengths("40"), "output_len": parse_lengths("2")}
    recorded(tmp_path / "recording", make_trace(Workload(num_requests=3, context_len=8192, **lengths)))
    with pytest.raises(TraceError, match="vocabulary of 100"):
        read_trace(tmp_path / "recording", vocab_size=100, max_new_tokens=None, ignore_eos=False, block_len=16)
