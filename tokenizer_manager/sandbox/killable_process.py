"""The inside of a killable child: it dies with its parent, keeps to its limits, and answers until end-of-file.

It has no open files but one socket, its standard input, and nothing is lost when it is killed.
"""

import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from .child_frames import LENGTH_BYTES, ChildReply, ChildSetup, to_frame

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
CHANNEL = 0

M = TypeVar("M")
S = TypeVar("S", bound=ChildSetup)
Q = TypeVar("Q")


def answer_until_closed(
    setup: S, request: type[Q], ready: Callable[[S], ChildReply], answer: Callable[[S, Q], ChildReply]
) -> None:
    """Get `ready` under the limits of the setup, say so, then `answer` request after request."""
    limit_resources(setup)
    limit_cpu(setup.seconds)
    write_reply(ready(setup))
    while True:
        message = read_message(request)
        limit_cpu(setup.seconds)
        write_reply(answer(setup, message))


def die_with_parent(name: str) -> None:
    """Be killed when the parent dies, leave Ctrl-C and SIGTERM to it, and show up as `name` (15 characters at most).

    A parent that died before this has closed its socket, so that the first read ends the process.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def limit_resources(setup: ChildSetup) -> None:
    """From now on: so much more memory, no file that grows, no core dump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + setup.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process if the next request uses much more CPU time than its parent would wait."""
    most = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def read_message(kind: type[M]) -> M:
    """The next frame; ends the process at end-of-file."""
    size = int.from_bytes(_read_exactly(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(_read_exactly(size), type=kind)


def write_reply(reply: ChildReply) -> None:
    """Send a frame to the parent."""
    rest = memoryview(to_frame(reply))
    while rest:
        rest = rest[os.write(CHANNEL, rest) :]


def _read_exactly(size: int) -> bytes:
    """`size` bytes from the parent."""
    body = bytearray()
    while len(body) < size:
        piece = os.read(CHANNEL, min(size - len(body), 2**20))
        if not piece:
            sys.exit(0)
        body += piece
    return bytes(body)
