"""The file of --record-schedule: what is written is read back, what is wrong is named, and errors stop only the file."""

import gzip
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.common.batch_messages import BatchResult, NewReq, PageColumns, ScheduleBatch
from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN
from millstream.common.links import ToScheduler
from millstream.common.messages import (
    AbortReq,
    ControlReqOutput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    pack_int32,
)
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import BatchTokenIDOutput, RequestEnd, RequestStats, StreamStart, TextEnded
from millstream.scheduler.recording.message_json import PlainError, from_plain, to_plain
from millstream.scheduler.recording.recording import Decision, Event, RecordingError, read_recording
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder, make_scheduler
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from tests.scheduler.make_traces import RecordedHarness

CONFIG = SchedulerConfig(num_pages=8, page_size=4, vocab_size=50, context_len=100, max_running_requests=2)
PARAMS = SamplingParams(max_new_tokens=3, stop=("a", "\n"), stop_token_ids=(1, 2), seed=2**62, temperature=0.1 + 0.2)
REQUEST = TokenizedGenerateReqInput(
    "r0",
    "http",
    0.1,
    pack_int32([1, -2, 2**31 - 1]),
    PARAMS,
    eos_token_ids=(7,),
    priority=-5,
    cache_salt="",
    timeout=1e300,
)
STATS = RequestStats(3, 2, 1)
MESSAGES = (
    REQUEST,
    AbortReq(["r0", "r1"], "gone", 499),
    FlushCacheReqInput("f", "http"),
    PauseGenerationReqInput("p", "http", "retract"),
    TextEnded("r0", 1, 2),
    BatchResult(3, *[pack_int32([5] * 6)] * 6, {4: "failed"}, 0.25),
    BatchResult(4, *[b""] * 6, {}, 0.0),
    ScheduleBatch(
        step=1,
        freed_rows=pack_int32([3]),
        new_reqs=[NewReq(0, 1, "r0", pack_int32([1, 2]), 2, PARAMS, (7,))],
        new_pages=[PageColumns(pack_int32([0]), pack_int32([2]), pack_int32([9, 8]))],
        extend_rows=pack_int32([0]),
        extend_starts=pack_int32([0]),
        extend_ends=pack_int32([2]),
        decode_rows=b"",
        decode_width=2,
    ),
    BatchTokenIDOutput(
        starts=[StreamStart("r0", "http", True, 2, b"", 0, (), True, False, ("x+",))],
        rids=["r0"],
        generations=pack_int32([0]),
        cached_tokens=pack_int32([0]),
        num_tokens=pack_int32([1]),
        token_ids=pack_int32([7]),
        ends=[
            RequestEnd("r0", FINISH_MATCHED_TOKEN(7), 1, STATS),
            RequestEnd("r1", FINISH_LENGTH(1), 1, STATS),
            RequestEnd("r2", FINISH_ABORT("gone \u2026", 499, "RequestAborted"), 1, STATS),
        ],
    ),
    ControlReqOutput("f", True, "done"),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_the_same_after_json(message: msgspec.Struct) -> None:
    plain = msgspec.json.decode(msgspec.json.encode(to_plain(message)))
    assert from_plain(type(message), plain) == message


def test_json_is_readable() -> None:
    assert to_plain(BatchResult(3, *[pack_int32([5] * 6)] * 5, b"", {}, 0.25)) == {
        "type": "BatchResult",
        "step": 3,
        **dict.fromkeys(("rows", "generations", "num_tokens", "token_ids", "row_lens"), "5*6"),
        "step_seconds": 0.25,
    }


def test_numbers_that_json_lacks_survive() -> None:
    message = msgspec.structs.replace(REQUEST, timeout=float("inf"), arrival=float("-inf"))
    assert from_plain(TokenizedGenerateReqInput, to_plain(message)) == message


@pytest.mark.parametrize(
    ("plain", "problem"),
    [
        ({"type": "AbortReq", "rids": ["a"], "what": 1}, "AbortReq has no field 'what'"),
        ({"type": "AbortReq", "rids": [1]}, "AbortReq.rids: Expected `str`, got `int`"),
        ({"type": "FlushCacheReqInput", "request_id": "a"}, "FlushCacheReqInput lacks the field 'frontend'"),
        ({"type": "Abort"}, "unknown type 'Abort'"),
        ([], "unknown type None"),
        (
            {"type": "TokenizedGenerateReqInput", "rid": "a", "frontend": "h", "arrival": 0, "input_ids": [2**31]},
            "TokenizedGenerateReqInput.input_ids: expected a list of 32-bit integers",
        ),
        (
            {"type": "TokenizedGenerateReqInput", "rid": "a", "frontend": "h", "arrival": 0, "input_ids": "1*-2"},
            "TokenizedGenerateReqInput.input_ids: '1*-2' is not of the form",
        ),
    ],
)
def test_json_that_is_no_message_is_refused_with_the_place(plain: Any, problem: str) -> None:
    with pytest.raises(PlainError) as error:
        from_plain(ToScheduler, plain)
    assert problem in str(error.value)


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "schedule.jsonl"
    harness = RecordedHarness(path)
    harness.ask("a", [1, 2, 3, 4, 5], 3)
    harness.finish()
    return path


def test_a_recording_is_read_back_with_its_config_and_as_often_as_asked(recording: Path) -> None:
    found = read_recording(recording)
    assert found.header.format == 1
    assert found.header.config.num_pages == 64
    entries = list(found)
    assert entries == list(found)
    first = entries[0]
    assert isinstance(first, Event)
    assert (first.line, first.what, first.now) == (2, "handle", 1.0)
    assert isinstance(first.message, TokenizedGenerateReqInput)
    assert any(isinstance(each, Decision) and isinstance(each.message, ScheduleBatch) for each in entries)
    assert not found.is_truncated


def test_a_compressed_recording_is_read(recording: Path) -> None:
    packed = recording.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(recording.read_bytes()))
    assert list(read_recording(packed)) == list(read_recording(recording))


def test_a_last_line_that_is_cut_off_is_dropped_and_reported(recording: Path) -> None:
    body = recording.read_bytes()
    lines = body.splitlines(keepends=True)
    for cut in range(1, len(lines[-1])):
        recording.write_bytes(body[:-cut])
        found = read_recording(recording)
        entries = list(found)
        assert len(entries) == len(lines) - 1 - found.is_truncated
        assert found.is_truncated == (cut > 1), "without its newline alone, the line is whole"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{}", "expected a decision, or an event"),
        (b'{"event":"plan"}', "expected a decision, or an event"),
        (b'{"event":"sleep","now":1}', "expected a decision, or an event"),
        (b'{"event":"plan","now":1,"message":{}}', "the event plan has no message"),
        (b'{"event":"handle","now":1}', "the event handle has a message"),
        (b'{"event":"plan","now":"x"}', "Expected `float | null`, got `str`"),
        (b'{"event":"plan","now":1,"then":2}', "unknown field `then`"),
        (b'{"decision":{"type":"AbortReq","rids":[]}}', "unknown type 'AbortReq'"),
        (b'{"decision":{"type":"ScheduleBatch"}}', "ScheduleBatch lacks the field 'step'"),
        (b'{"decision":{"type":"ScheduleBatch","step":1},"now":1}', "a decision has nothing beside it"),
        (b'{"event":"result","now":1,"message":{"type":"BatchResult","step":[1]}}', "BatchResult.step: Expected `int`"),
        (b'{"event":"handle","now":1,"message":{"type":"AbortReq","rids":["\xff"]}}', "line 3"),
        (b"[", "line 3"),
        (b"", "line 3"),
    ],
)
def test_a_wrong_line_is_named(recording: Path, line: bytes, problem: str) -> None:
    lines = recording.read_bytes().splitlines()
    recording.write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]) + b"\n")
    with pytest.raises(RecordingError) as error:
        list(read_recording(recording))
    assert str(error.value).startswith(f"{recording} line 3: ")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "line 1: Input data was truncated"),
        (b"MZ\x90", "line 1: "),
        (b"[1]", "is not a recording of --record-schedule"),
        (b'{"model":"x"}', "is not a recording of --record-schedule"),
        (b'{"format":2,"steps":[]}', "has format 2, and this version reads format 1"),
        (b'{"format":1,"version":"9","config":{"warp":1}}', "line 1: this version has no option warp"),
        (b'{"format":1,"version":"9","config":[]}', "line 1: "),
        (b'{"format":1,"version":"9","config":{"num_pages":"x"}}', "line 1: Expected `int`, got `str`"),
    ],
)
def test_a_wrong_first_line_is_named(tmp_path: Path, header: bytes, problem: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(header + b"\n" if header else b"")
    with pytest.raises(RecordingError) as error:
        read_recording(path)
    assert str(path) in str(error.value)
    assert problem in str(error.value)


def test_a_damaged_compressed_file_is_named(recording: Path) -> None:
    packed = recording.with_suffix(".gz")
    packed.write_bytes(gzip.compress(recording.read_bytes())[:-30])
    with pytest.raises(RecordingError, match="Compressed file ended"):
        list(read_recording(packed))
    packed.write_bytes(b"plain")
    with pytest.raises(RecordingError, match="Not a gzipped file"):
        read_recording(packed)


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[ScheduleRecorder]:
    recorder = ScheduleRecorder(tmp_path / "new.jsonl", CONFIG)
    yield recorder
    recorder.close()


def test_the_file_is_for_its_owner_alone_and_begins_with_the_config(recorder: ScheduleRecorder) -> None:
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert read_recording(recorder.path).header.config == CONFIG


def test_a_file_that_exists_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        make_scheduler(CONFIG, str(path))
    assert path.read_text() == "precious"


def test_without_the_flag_nothing_is_recorded() -> None:
    assert type(make_scheduler(CONFIG)) is Scheduler


def test_lines_reach_the_file_at_the_snapshot(recorder: ScheduleRecorder) -> None:
    scheduler = RecordedScheduler(CONFIG, recorder)
    scheduler.handle(REQUEST, 1.0)
    assert list(read_recording(recorder.path)) == []
    scheduler.take_snapshot(2.0)
    assert [each.what for each in read_recording(recorder.path) if isinstance(each, Event)] == ["handle", "snapshot"]


def test_many_lines_reach_the_file_without_a_snapshot(recorder: ScheduleRecorder) -> None:
    for _ in range(10000):
        recorder.write(b'{"event":"plan","now":1.0}\n')
    assert recorder.path.stat().st_size > 200_000
    assert recorder.num_bytes > recorder.path.stat().st_size


def test_the_event_that_the_scheduler_fails_on_is_in_the_file(recorder: ScheduleRecorder) -> None:
    scheduler = RecordedScheduler(CONFIG, recorder)
    with pytest.raises(Exception, match="step"):
        scheduler.process_batch_result(BatchResult(3, *[b""] * 6, {}, 0.25), 1.0)
    assert [each.line for each in read_recording(recorder.path)] == [2]


def test_a_full_disk_ends_the_recording_with_one_line_and_not_the_scheduler(
    recorder: ScheduleRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = RecordedScheduler(CONFIG, recorder)
    full = os.open("/dev/full", os.O_WRONLY)
    assert recorder._fd is not None
    os.dup2(full, recorder._fd)
    os.close(full)
    with caplog.at_level(logging.ERROR):
        for number in range(5):
            scheduler.handle(msgspec.structs.replace(REQUEST, rid=f"r{number}", input_ids=pack_int32([1, 2])), 1.0)
            scheduler.get_next_batch_to_run(1.0)
            scheduler.take_snapshot(1.0)
    assert not recorder.is_recording
    assert [record.getMessage() for record in caplog.records] == [
        f"--record-schedule {recorder.path}: No space left on device; the recording ends here"
    ]
    assert len(scheduler.state.requests) == 5
