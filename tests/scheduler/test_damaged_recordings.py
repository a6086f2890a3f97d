"""A recording that is damaged: replay names the line, or shows a difference, and never ends in a traceback."""

import gzip
import logging
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millstream.scheduler.recording.recording import RecordingError, read_recording
from millstream.scheduler.recording.replay_command import main
from tests.scheduler.make_traces import TRACES

SEEDS = range(0, 500, 10)
JUNK = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    -(2**40),
    1.5,
    1e300,
    "",
    "x",
    "nan",
    "5*3",
    [],
    [1, 2],
    [None],
    {},
    {"a": 1},
)


def damaged_bytes(lines: list[bytes], rng: random.Random) -> bytes:
    """Bytes changed, cut out or doubled."""
    body = bytearray(b"\n".join(lines))
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(body))
        match rng.randrange(3):
            case 0:
                body[place] = rng.choice([rng.randrange(256), *b'0123456789[]{}",:-'])
            case 1:
                del body[place : place + rng.choice([1, 2, 100])]
            case _:
                body[place:place] = body[place : place + rng.choice([1, 2, 100])]
    return bytes(body)


def damaged_lines(lines: list[bytes], rng: random.Random) -> bytes:
    """Lines lost, doubled or swapped."""
    lines = list(lines)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(3):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case _:
            lines[place], lines[other] = lines[other], lines[place]
    return b"\n".join(lines) + b"\n"


def damaged_values(lines: list[bytes], rng: random.Random) -> bytes:
    """Another value somewhere in the JSON of a line: of the wrong type, out of range, or of another length."""
    lines = list(lines)
    for _ in range(rng.choice([1, 1, 3])):
        number = rng.choice([0, rng.randrange(len(lines)), rng.randrange(len(lines))])
        line = msgspec.json.decode(lines[number])
        holder, key = rng.choice(list(places(line)))
        old = holder[key]
        if isinstance(old, list) and rng.random() < 0.5:
            holder[key] = rng.choice([old[1:], [*old, 1], old[::-1], [*old, *old]])
        elif isinstance(old, int | float) and rng.random() < 0.5:
            holder[key] = rng.choice([old + 1, old - 1, -old, old * 1000])
        else:
            holder[key] = rng.choice(JUNK)
        lines[number] = msgspec.json.encode(line)
    return b"\n".join(lines) + b"\n"


def places(value: Any) -> Any:
    """Every (container, key) below a JSON value."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def replay_damaged(path: Path, seed: int) -> int:
    """Damage one of the stored traces in a way that the seed chooses, and replay it."""
    rng = random.Random(seed)
    trace = rng.choice(sorted(TRACES.glob("*.jsonl")))
    damage = rng.choice([damaged_bytes, damaged_lines, damaged_values, damaged_values])
    path.write_bytes(damage(trace.read_bytes().splitlines(), rng))
    return main([str(path)])


def test_any_damage_is_a_difference_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = set()
    for seed in SEEDS:
        code = replay_damaged(tmp_path / "damaged.jsonl", seed)
        captured = capsys.readouterr()
        codes.add(code)
        context = f"seed {seed}: {code} {captured}"
        assert "Traceback" not in captured.out + captured.err, context
        if code == 2:
            assert re.fullmatch(r"millstream replay: error: \S+ ?.*\n", captured.err), context
            assert captured.out == "", context
        else:
            assert captured.err == "", context
            assert captured.out.count("\n") == 1 or code == 1, context
    assert codes == {0, 1, 2}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "lpm.jsonl"
    path.write_bytes((TRACES / "lpm.jsonl").read_bytes())
    return path


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("schedule_policy", "best", "--schedule-policy must be one of fcfs"),
        ("radix_eviction_policy", "oldest", "--radix-eviction-policy must be one of lru"),
        ("num_pages", 0, "num_pages must be from 1 to"),
        ("num_pages", 10**12, "num_pages must be from 1 to"),
        ("page_size", 0, "--page-size must be"),
        ("page_size", 12, "--page-size must be a power of two"),
        ("max_running_requests", 0, "max_running_requests must be"),
        ("max_running_requests", 2**40, "max_running_requests must be"),
        ("vocab_size", -5, "vocab_size must be"),
        ("context_len", 2**40, "context_len must be"),
        ("decode_width", 0, "decode_width must be"),
        ("chunked_prefill_size", -7, "--chunked-prefill-size must be"),
        ("schedule_conservativeness", -1.0, "--schedule-conservativeness must be"),
        ("request_timeout", -1.0, "--request-timeout must be"),
        ("enable_priority_scheduling", True, "--enable-priority-scheduling goes with"),
    ],
)
def test_a_header_that_no_server_wrote_is_refused(
    trace: Path, name: str, value: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    header = msgspec.json.decode(lines[0])
    header["config"][name] = value
    trace.write_bytes(msgspec.json.encode(header) + b"\n" + b"".join(lines[1:]))
    assert main([str(trace)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"millstream replay: error: {trace} line 1: {problem}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("holder", "column"),
    [
        ('"message":{"type":"BatchResult"', "rows"),
        ('"message":{"type":"BatchResult"', "generations"),
        ('"message":{"type":"BatchResult"', "num_tokens"),
        ('"message":{"type":"BatchResult"', "token_ids"),
        ('"message":{"type":"BatchResult"', "row_lens"),
        ('"message":{"type":"BatchResult"', "flags"),
        ('"decision":{"type":"ScheduleBatch"', "extend_rows"),
        ('"decision":{"type":"ScheduleBatch"', "extend_starts"),
        ('"decision":{"type":"ScheduleBatch"', "extend_ends"),
        ('"decision":{"type":"ScheduleBatch"', "counts"),
        ('"decision":{"type":"ScheduleBatch"', "page_ids"),
        ('"decision":{"type":"BatchTokenIDOutput"', "rids"),
        ('"decision":{"type":"BatchTokenIDOutput"', "cached_tokens"),
        ('"decision":{"type":"BatchTokenIDOutput"', "num_tokens"),
        ('"decision":{"type":"BatchTokenIDOutput"', "token_ids"),
    ],
)
def test_columns_that_do_not_belong_together_are_damage_and_no_difference(
    trace: Path, holder: str, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = trace.read_bytes().splitlines()
    wanted = f'"{column}":'.encode()
    number = next(n for n, line in enumerate(lines) if holder.encode() in line and wanted in line)
    line = msgspec.json.decode(lines[number])
    owner, key = next((owner, key) for owner, key in places(line) if key == column)
    owner[key] = ["r9", "r1"] * 9 if column == "rids" else [9, 1, 2] * 9
    lines[number] = msgspec.json.encode(line)
    trace.write_bytes(b"\n".join(lines) + b"\n")
    assert main([str(trace)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"millstream replay: error: {trace} line {number + 1}: ")
    assert column in err
    assert err.count("\n") == 1


def test_packed_data_that_is_damaged_is_named(trace: Path) -> None:
    packed = trace.with_suffix(".gz")
    body = bytearray(gzip.compress(trace.read_bytes()))
    for place in range(30, len(body), 97):
        damaged = body.copy()
        damaged[place] ^= 0x55
        packed.write_bytes(damaged)
        with pytest.raises(RecordingError, match=re.escape(str(packed))):
            list(read_recording(packed))


def test_a_line_nested_without_end_is_named(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes() + b'{"event":' + b"[" * 100_000 + b"\n")
    with pytest.raises(RecordingError, match=r"line \d+: "):
        list(read_recording(trace))


def test_what_the_replayed_scheduler_logs_is_not_shown(trace: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert main([str(TRACES / "retraction.jsonl")]) == 0
    assert not [record for record in caplog.records if record.name.startswith("millstream.scheduler")]
