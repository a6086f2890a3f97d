"""Runs a function in several processes that are each other's tensor-parallel ranks."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from millstream.common import cpu
from millstream.kernels import collectives
from millstream.tp_worker.communicator import Communicator
from millstream.tp_worker.gloo import GlooCommunicator
from millstream.tp_worker.shared_memory import SharedMemoryCommunicator

MakeCommunicator = Callable[[int], Communicator]


def run_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Fork `size` processes, run `function(rank)` in each; their results (msgpack), or AssertionError if one fails."""
    readers, pids = [], []
    for rank in range(size):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, function, writer)
        os.close(writer)
        readers.append(reader)
        pids.append(pid)
    results = [_read_all(reader) for reader in readers]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * size
    return [msgspec.msgpack.decode(result) for result in results]


def communicators(kind: str, size: int, **options: Any) -> MakeCommunicator:
    """What makes each rank's communicator after the fork: "shared memory" or "gloo"."""
    if kind == "gloo":
        store_file = Path(tempfile.mkdtemp()) / "ranks"
        return lambda rank: GlooCommunicator(rank, size, store_file, timeout=30.0)
    collectives.has_native_version()  # built once, before the fork
    descriptor = os.memfd_create("test")

    def make(rank: int) -> Communicator:
        return SharedMemoryCommunicator(rank, size, os.dup(descriptor), **{"timeout": 30.0, **options})

    return make


def _run_rank(rank: int, function: Callable[[int], Any], writer: int) -> None:
    code = 1
    try:
        cpu.num_physical_cores = lambda: 1  # the thread pool does not survive a fork
        torch.set_num_threads(1)
        body = msgspec.msgpack.encode(function(rank))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(body)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _read_all(reader: int) -> bytes:
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()
