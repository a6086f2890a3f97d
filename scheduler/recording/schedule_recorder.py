"""`--record-schedule FILE`: a Scheduler that also writes what it is told and what it decides (recording.py).

Recording never stops the server: after a write error the file ends where it is, and one line in the log says so.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ... import __version__
from ...common.batch_messages import BatchResult, GrammarReady, ScheduleBatch
from ...common.links import ControlReply, ToScheduler
from ...common.messages import ControlReqOutput, ExplainReqInput, LoadSnapshot
from ...common.text_messages import BatchTokenIDOutput, TextEnded
from ..scheduler import Scheduler
from ..scheduler_config import SchedulerConfig
from .recording import encode_decision, encode_event, encode_header

BUFFER_BYTES = 1 << 18

logger = logging.getLogger(__name__)


class ScheduleRecorder:
    """The file: lines gather in memory until there are many, or until `flush`."""

    def __init__(self, path: Path, config: SchedulerConfig) -> None:
        """Make the file, for its owner alone; FileExistsError or another OSError where it can't be made."""
        self.path = path
        self.num_bytes = 0  # written and gathered
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._lines: list[bytes] = []
        self._gathered_bytes = 0
        self.write(encode_header(config, __version__))
        self.flush()

    @property
    def is_recording(self) -> bool:
        """False once a write has failed, or after `close`."""
        return self._fd is not None

    def write(self, line: bytes) -> None:
        """Add a line."""
        if self._fd is None:
            return
        self._lines.append(line)
        self._gathered_bytes += len(line)
        self.num_bytes += len(line)
        if self._gathered_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Give what has gathered to the operating system; after an error the recording is over."""
        if self._fd is None:
            return
        rest = memoryview(b"".join(self._lines))
        self._lines, self._gathered_bytes = [], 0
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            logger.error("--record-schedule %s: %s; the recording ends here", self.path, error.strerror or error)
            self.close()

    def close(self) -> None:
        """End the recording; what has gathered is written first. Idempotent."""
        if self._lines:
            self.flush()
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None


class RecordedScheduler(Scheduler):
    """A Scheduler that writes every call and what came of it. Explanations change nothing and are not recorded."""

    def __init__(self, config: SchedulerConfig, recorder: ScheduleRecorder) -> None:
        super().__init__(config)
        self.recorder = recorder

    def handle(self, message: ToScheduler | TextEnded | GrammarReady, now: float) -> None:
        """As Scheduler's."""
        if isinstance(message, ExplainReqInput):
            super().handle(message, now)
            return
        self.recorder.write(encode_event("handle", now, message))
        with self._kept_on_failure():
            super().handle(message, now)

    def process_batch_result(self, result: BatchResult, now: float) -> None:
        """As Scheduler's."""
        self.recorder.write(encode_event("result", now, result))
        with self._kept_on_failure():
            super().process_batch_result(result, now)

    def get_next_batch_to_run(self, now: float) -> ScheduleBatch | None:
        """As Scheduler's. A call that gives no batch is recorded too: it may have changed something."""
        self.recorder.write(encode_event("plan", now))
        with self._kept_on_failure():
            batch = super().get_next_batch_to_run(now)
        if batch is not None:
            self.recorder.write(encode_decision(batch))
        return batch

    def take_output(self) -> BatchTokenIDOutput | None:
        """As Scheduler's."""
        output = super().take_output()
        if output is not None:
            self.recorder.write(encode_decision(output))
        return output

    def take_replies(self) -> list[ControlReply]:
        """As Scheduler's."""
        replies = super().take_replies()
        for reply in replies:
            if isinstance(reply, ControlReqOutput):
                self.recorder.write(encode_decision(reply))
        return replies

    def take_snapshot(self, now: float, num_dropped_frames: int = 0) -> LoadSnapshot:
        """As Scheduler's; what has gathered goes to the file."""
        self.recorder.write(encode_event("snapshot", now))
        with self._kept_on_failure():
            snapshot = super().take_snapshot(now, num_dropped_frames)
        self.recorder.flush()
        return snapshot

    def check_when_idle(self) -> None:
        """As Scheduler's."""
        self.recorder.write(encode_event("check", self.state.now))
        with self._kept_on_failure():
            super().check_when_idle()

    def close(self) -> None:
        """As Scheduler's; what nobody took is decided all the same, and the file is complete."""
        self.take_output()
        self.take_replies()
        self.recorder.write(encode_event("close", self.state.now))
        self.recorder.close()

    @contextmanager
    def _kept_on_failure(self) -> Iterator[None]:
        """The call that fails is the last event of the file."""
        try:
            yield
        except BaseException:
            self.recorder.flush()
            raise


def make_scheduler(config: SchedulerConfig, record_schedule: str | None = None) -> Scheduler:
    """The scheduler of a server; recorded where a file is named. OSError where the file can't be made."""
    if record_schedule is None:
        return Scheduler(config)
    return RecordedScheduler(config, ScheduleRecorder(Path(record_schedule), config))
