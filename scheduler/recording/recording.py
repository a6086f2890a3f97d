"""The file of `--record-schedule`: what the scheduler was told, and what it decided, as JSON lines.

    {"format": 1, "version": "0.1.0", "config": {SchedulerConfig}}                               the first line
    {"event": "handle", "now": 12.5, "message": {"type": "TokenizedGenerateReqInput", ...}}      ToScheduler | TextEnded
    {"event": "result", "now": 12.5, "message": {"type": "BatchResult", ...}}
    {"event": "plan", "now": 12.5}             get_next_batch_to_run was called; it gave a batch if one follows
    {"event": "snapshot", "now": 12.5}         take_snapshot was called
    {"event": "check", "now": 12.5}            check_when_idle was called
    {"event": "close", "now": 12.5}            the end: nothing more is decided, and nothing waits to be taken
    {"decision": {"type": "ScheduleBatch" | "BatchTokenIDOutput" | "ControlReqOutput", ...}}

`now` is the monotonic clock of the host in seconds, as the requests' `arrival`. Messages are written as message_json.py
says. The token ids of prompts and outputs are in the file: who reads it reads the conversations.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from ...common.batch_messages import BatchResult, GrammarReady, ScheduleBatch
from ...common.links import ToScheduler
from ...common.messages import ControlReqOutput
from ...common.text_messages import BatchTokenIDOutput, TextEnded
from ..scheduler_config import SchedulerConfig
from .consistency import InconsistentError, check_columns, check_config
from .message_json import PlainError, from_plain, to_plain

FORMAT = 1
EVENT_TYPES = {
    "handle": ToScheduler | TextEnded | GrammarReady,
    "result": BatchResult,
    "plan": None,
    "snapshot": None,
    "check": None,
    "close": None,
}

LINE_ERRORS = (msgspec.DecodeError, PlainError, InconsistentError, RecursionError)

Told = ToScheduler | TextEnded | GrammarReady | BatchResult
Decided = ScheduleBatch | BatchTokenIDOutput | ControlReqOutput


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    format: int
    version: str  # of the package that recorded
    config: SchedulerConfig


class Event(NamedTuple):
    """The scheduler was called: `what` is a key of EVENT_TYPES."""

    line: int
    what: str
    now: float
    message: Told | None


class Decision(NamedTuple):
    """What it gave back."""

    line: int
    message: Decided


Entry = Event | Decision


class RecordingError(ValueError):
    """The file can't be read, or a line is not what a recording holds; the message names file and line."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    event: str | None = None
    now: float | None = None
    message: dict[str, Any] | None = None
    decision: dict[str, Any] | None = None


class Recording:
    """A recording on disk; iterating reads it from the start, line by line, as often as you like.

    `is_truncated` is set where a pass finds that the last line is cut off (the server was killed while it wrote).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_truncated = False
        with _open(path) as file:
            self.header = _read_header(path, next(_lines(path, file), b""))

    def __iter__(self) -> Iterator[Entry]:
        """Every event and decision in order; RecordingError."""
        with _open(self.path) as file:
            lines = _lines(self.path, file)
            next(lines, None)
            for number, text in enumerate(lines, start=2):
                try:
                    yield _read_line(number, text)
                except LINE_ERRORS as error:
                    if not text.endswith(b"\n"):
                        self.is_truncated = True
                        return
                    raise RecordingError(f"{self.path} line {number}: {error}") from None


def read_recording(path: Path) -> Recording:
    """Open a recording (plain, or gzip where the name ends with .gz) and check its header; RecordingError."""
    return Recording(path)


def encode_header(config: SchedulerConfig, version: str) -> bytes:
    """The first line."""
    return msgspec.json.encode(Header(FORMAT, version, config)) + b"\n"


def encode_event(what: str, now: float, message: Told | None = None) -> bytes:
    """The line of an event."""
    line = {"event": what, "now": now}
    return msgspec.json.encode(line if message is None else {**line, "message": to_plain(message)}) + b"\n"


def encode_decision(message: Decided) -> bytes:
    """The line of a decision."""
    return msgspec.json.encode({"decision": to_plain(message)}) + b"\n"


def _open(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path) if path.name.endswith(".gz") else path.open("rb"))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path}: {error}") from None


def _read_header(path: Path, text: bytes) -> Header:
    try:
        found = msgspec.json.decode(text)
        if not isinstance(found, dict) or "format" not in found:
            raise RecordingError(f"{path} is not a recording of --record-schedule")
        if found["format"] != FORMAT:
            raise RecordingError(f"{path} has format {found['format']}, and this version reads format {FORMAT}")
        config, known = found.get("config"), {each.name for each in msgspec.structs.fields(SchedulerConfig)}
        if isinstance(config, dict) and (unknown := config.keys() - known):
            raise RecordingError(f"{path} line 1: this version has no option {', '.join(sorted(unknown))}")
        header = msgspec.convert(found, Header)
        check_config(header.config)
        return header
    except LINE_ERRORS as error:
        raise RecordingError(f"{path} line 1: {error}") from None


def _read_line(number: int, text: bytes) -> Entry:
    line = msgspec.json.decode(text, type=_Line)
    if line.decision is not None:
        if (line.event, line.now, line.message) != (None, None, None):
            raise PlainError("a decision has nothing beside it")
        decision = from_plain(Decided, line.decision)
        check_columns(decision)
        return Decision(number, decision)
    if line.event not in EVENT_TYPES or line.now is None:
        raise PlainError(f"expected a decision, or an event ({', '.join(EVENT_TYPES)}) with its time")
    kind = EVENT_TYPES[line.event]
    if (kind is None) != (line.message is None):
        raise PlainError(f"the event {line.event} has {'no' if kind is None else 'a'} message")
    message = None if line.message is None else from_plain(kind, line.message)
    if message is not None:
        check_columns(message)
    return Event(number, line.event, line.now, message)
