"""Logging of every process: one line a record, to standard error, with the process's name."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FORMAT = "%(asctime)s %(levelname)-7s {name}: %(message)s"


def set_up_logging(level: str, process_name: str) -> None:
    """Send this process's records of `level` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT.format(name=process_name), datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


@contextmanager
def quiet_below(level: int, name: str) -> Iterator[None]:
    """The loggers from `name` on say nothing below `level`."""
    ours = logging.getLogger(name)
    level_before = ours.level
    ours.setLevel(level)
    try:
        yield
    finally:
        ours.setLevel(level_before)
