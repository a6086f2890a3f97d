"""`millstream replay FILE`: run the scheduler over a recording and show the first decision that differs."""

import argparse
import logging
import sys
from pathlib import Path

from ...common.command_line import Parser
from ...common.flags import ConfigError
from ...common.logs import quiet_below
from ..scheduler import Scheduler
from .recording import Recording, RecordingError, read_recording
from .replay import ReplayReport, replay

ALL_EQUAL = 0
DIFFERS = 1
BAD_COMMAND_LINE = 2


def main(argv: list[str]) -> int:
    """0: every decision is the recorded one; 1: one differs; 2: a wrong command line, or a file that can't be read."""
    try:
        recording = read_recording(Path(_parse(argv).file))
        with quiet_below(logging.CRITICAL, Scheduler.__module__.rpartition(".")[0]):
            report = replay(recording)
    except (ConfigError, RecordingError) as error:
        print(f"millstream replay: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_COMMAND_LINE
    print(_summary(recording, report))
    return ALL_EQUAL if report.difference is None else DIFFERS


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="millstream replay",
        description="Run the scheduler over a recording of --record-schedule, without workers, and show the first "
        "decision that differs. Exit code 0: all are equal, 1: one differs, 2: the file can't be read or is damaged.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="what --record-schedule wrote; .gz is unpacked")
    return parser.parse_known_flags(argv)


def _summary(recording: Recording, report: ReplayReport) -> str:
    counts = f"{report.num_events} events, {report.num_decisions} decisions"
    if report.difference is not None:
        return f"{counts} until the first difference\n{report.difference}"
    cut = "\nThe last line is cut off: the recording ended while it was written." if recording.is_truncated else ""
    return f"{counts}: all equal{cut}"
