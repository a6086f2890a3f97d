"""Recorded schedules: the same scheduler decides the same, and a replay names the first decision that differs."""

import logging
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.common.messages import ExplainReqInput, ExplainReqOutput
from millstream.scheduler.recording.recording import Decision, Event, read_recording
from millstream.scheduler.recording.replay import Difference, replay
from millstream.scheduler.recording.replay_command import main
from tests.scheduler.make_traces import SCENARIOS, TRACES, RecordedHarness, lpm, storm

CONFIGS: tuple[dict[str, Any], ...] = (
    {"page_size": 1, "num_pages": 120, "chunked_prefill_size": 8},
    {"page_size": 4, "num_pages": 24, "schedule_conservativeness": 0.1},
    {"page_size": 16, "num_pages": 12, "disable_overlap_schedule": True, "radix_eviction_policy": "lfu"},
    {"decode_width": 3, "num_pages": 30, "schedule_policy": "lpm", "max_running_requests": 4},
    {"enable_priority_scheduling": True, "max_running_requests": 3, "num_pages": 30},
    {"schedule_policy": "random", "random_seed": 5, "max_running_requests": 3},
    {"schedule_policy": "dfs-weight", "max_running_requests": 3, "disable_radix_cache": False},
    {"chunked_prefill_size": 0, "max_queued_requests": 4, "request_timeout": 5.0, "failing_token_id": 11},
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "millstream.scheduler")


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_stored_trace_is_decided_as_it_was(path: Path) -> None:
    report = replay(read_recording(path))
    assert report.difference is None, f"{path.name}: {report.difference}\n(make_traces.py makes them anew)"
    assert report.num_decisions > 20


def test_no_decision_depends_on_the_hash_seed() -> None:
    code = "import sys; from millstream.scheduler.recording.replay_command import main; sys.exit(max(main([a]) for a in sys.argv[1:]))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, sorted(TRACES.glob("*.jsonl")))],
            env={"PYTHONPATH": str(TRACES.parents[2] / ".pkg"), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.count("all equal")) == (0, len(SCENARIOS)), done.stdout + done.stderr


def test_every_scenario_has_its_stored_trace_and_none_is_left_over() -> None:
    assert {path.stem for path in TRACES.glob("*")} == {scenario.__name__ for scenario in SCENARIOS}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_random_storm_is_replayed_with_equal_decisions(config: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(3):
        path = tmp_path / f"{seed}.jsonl"
        harness = RecordedHarness(path, **config)
        storm(harness, seed, num_reqs=16, max_new_tokens=40, priorities=(None, 0, 30), is_rude=True)
        harness.finish()
        report = replay(read_recording(path))
        assert report.difference is None, f"seed {seed}: {report.difference}"
        assert report.num_decisions > 20


@pytest.mark.parametrize("kind", ["BatchTokenIDOutput", "ControlReqOutput"])
def test_outputs_and_replies_that_the_recording_lacks_are_a_difference(kind: str, tmp_path: Path) -> None:
    lines = (TRACES / "pause_and_continue.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if kind not in line]
    assert len(kept) < len(lines)
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(kept))
    difference = replay(read_recording(path)).difference
    assert difference is not None
    assert difference.what == kind


def test_a_recording_holds_every_batch_and_result_in_order(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    harness = RecordedHarness(path)
    storm(harness, 1)
    harness.finish()
    entries = list(read_recording(path))
    batches = [each.message for each in entries if isinstance(each, Decision) and each.message in harness.batches]
    assert batches == harness.batches
    assert sum(isinstance(each, Event) and each.what == "result" for each in entries) == len(batches)
    assert [each.line for each in entries] == list(range(2, len(entries) + 2))


def test_a_question_about_a_request_is_answered_and_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    harness = RecordedHarness(path)
    harness.ask("a", [1, 2, 3], 2)
    harness.run()
    harness.scheduler.handle(ExplainReqInput("question", "http", "a"), harness.now)
    (reply,) = harness.scheduler.take_replies()
    assert isinstance(reply, ExplainReqOutput)
    assert [event.what for event in reply.events] == ["queued", "admitted", "chunk", "first_token", "ended"]
    harness.scheduler.close()
    assert b"Explain" not in path.read_bytes()
    assert replay(read_recording(path)).difference is None


# ---- a difference is named -------------------------------------------------------------------------------------------


def changed(path: Path, kind: str, column: str, change: Callable[[dict[str, Any]], None]) -> Difference:
    """Replay the trace with a decision changed, the fifth that has the column; the report must point at its line."""
    lines = path.read_bytes().splitlines()
    start, wanted = f'{{"decision":{{"type":"{kind}"'.encode(), f'"{column}":['.encode()
    number = [number for number, line in enumerate(lines) if line.startswith(start) and wanted in line][4]
    line = msgspec.json.decode(lines[number])
    change(line["decision"])
    lines[number] = msgspec.json.encode(line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    difference = replay(read_recording(path)).difference
    assert difference is not None
    assert difference.line == number + 1
    assert difference.what == kind
    return difference


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "lpm.jsonl"
    lpm(path)
    return path


def test_another_decode_row_is_named_with_its_request(trace: Path) -> None:
    def leave_one_out(batch: dict[str, Any]) -> None:
        batch["decode_rows"] = batch["decode_rows"][1:]

    difference = changed(trace, "ScheduleBatch", "decode_rows", leave_one_out)
    assert difference.field == "decodes"
    assert difference.recorded == []
    (row,) = difference.now
    assert row.startswith("row ")
    assert "(r" in row


def test_another_order_of_rows_is_named_with_the_place(trace: Path) -> None:
    def swap(batch: dict[str, Any]) -> None:
        batch["decode_rows"] = batch["decode_rows"][::-1]

    difference = changed(trace, "ScheduleBatch", "decode_rows", swap)
    assert difference.field == "decodes"
    assert "at place 0" in difference.recorded[0]


def test_another_token_is_named_with_its_request(trace: Path) -> None:
    def change(output: dict[str, Any]) -> None:
        output["token_ids"][0] += 1

    difference = changed(trace, "BatchTokenIDOutput", "token_ids", change)
    assert difference.field == "tokens"
    assert difference.recorded != difference.now
    assert difference.recorded[0].split(":")[0] == difference.now[0].split(":")[0]


def test_what_the_words_do_not_say_is_shown_as_json(trace: Path) -> None:
    def change(batch: dict[str, Any]) -> None:
        batch["new_reqs"][0]["end_token_ids"] = [42]

    difference = changed(trace, "ScheduleBatch", "new_reqs", change)
    assert difference.field == "new_reqs[0].end_token_ids"
    assert (difference.recorded, difference.now) in [(["[42]"], ["[3,4]"]), (["[42]"], [])]


def test_a_batch_that_was_not_recorded_is_shown(trace: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    number = max(n for n, line in enumerate(lines) if b'"decision":{"type":"ScheduleBatch"' in line)
    trace.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    difference = replay(read_recording(trace)).difference
    assert difference is not None
    assert (difference.line, difference.recorded) == (number + 1, ["none"])
    assert difference.now[0].startswith("step: ")


def test_a_batch_that_is_planned_no_more_is_shown(trace: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    number = max(n for n, line in enumerate(lines) if b'"decision":{"type":"ScheduleBatch"' in line)
    trace.write_bytes(b"".join([*lines[: number + 1], lines[number]]))
    difference = replay(read_recording(trace)).difference
    assert difference is not None
    assert (difference.line, difference.now) == (number + 2, ["none"])


def test_an_event_that_the_scheduler_fails_on_is_named(trace: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if b'"event":"result"' in line)
    trace.write_bytes(b"".join([*lines[: number + 1], lines[number], *lines[number + 1 :]]))
    difference = replay(read_recording(trace)).difference
    assert difference is not None
    assert difference.line in {number + 2, number + 3}
    assert any("ProtocolError" in item for item in difference.now) or difference.what == "BatchTokenIDOutput"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_that_all_are_equal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace)]) == 0
    out = capsys.readouterr().out
    entries = list(read_recording(trace))
    num_events = sum(isinstance(each, Event) for each in entries)
    assert out == f"{num_events} events, {len(entries) - num_events} decisions: all equal\n"


def test_the_command_shows_the_first_difference(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shorten(batch: dict[str, Any]) -> None:
        batch["extend_ends"] = [end - 4 for end in batch["extend_ends"]]

    difference = changed(trace, "ScheduleBatch", "extend_ends", shorten)
    assert main([str(trace)]) == 1
    out = capsys.readouterr().out
    assert f"line {difference.line}, step {difference.step}: ScheduleBatch: prefill\n" in out
    assert re.search(r"^  recorded: row \d \(r\d+\) computes \[\d+, \d+\)$", out, re.MULTILINE)
    assert re.search(r"^  now:      row \d \(r\d+\) computes \[\d+, \d+\)$", out, re.MULTILINE)


def test_the_command_tolerates_a_last_line_that_is_cut_off(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    assert main([str(trace)]) == 0
    assert "cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["FILE", "--sett"], "unknown argument --sett"),
        (["/nowhere/schedule.jsonl"], "/nowhere/schedule.jsonl: No such file"),
        (["/"], "/: Is a directory"),
    ],
)
def test_the_command_refuses_in_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_scheduler_logs_again_after_a_replay(trace: Path) -> None:
    level = random.choice([logging.INFO, logging.DEBUG])
    logging.getLogger("millstream.scheduler").setLevel(level)
    main([str(trace)])
    assert logging.getLogger("millstream.scheduler").level == level
