"""A child process that may be killed at any time: what can stall or exhaust a process is done there.

One child answers one request at a time; others wait their turn. A request that takes too long, or takes the child down
with it, fails alone, and the next one gets a new child.
"""

import asyncio
import logging
import socket
import subprocess
import sys
from typing import Generic, TypeVar

import msgspec

from ...common.config import child_environment
from .child_frames import LENGTH_BYTES, MAX_FRAME_BYTES, ChildReply, ChildSetup, to_frame

START_SECONDS = 60.0
REAP_SECONDS = 2.0

R = TypeVar("R", bound=ChildReply)
logger = logging.getLogger(__name__)


class ChildTimeout(Exception):
    """The child was killed: it took longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"longer than {seconds:g} s")
        self.seconds = seconds


class ChildDied(Exception):
    """The request took the child down with it."""


class KillableChild(Generic[R]):
    """The module `module` of this folder as a process, or the next one. Use it in the main thread's event loop."""

    def __init__(self, module: str, setup: ChildSetup, reply: type[R]) -> None:
        self._module = module
        self._setup = setup
        self._reply = reply
        self._process: ChildProcess[R] | None = None
        self._turn = asyncio.Lock()
        self._requests: set[asyncio.Task[R]] = set()

    def start(self) -> None:
        """Start the process, which gets ready in the background."""
        self._process = self._new_process()

    @property
    def pid(self) -> int | None:
        """The id of the process that runs, if any."""
        return self._process.pid if self._process is not None else None

    async def ask(self, request: msgspec.Struct) -> R:
        """The child's answer; ChildTimeout or ChildDied."""
        task = asyncio.ensure_future(self._ask_in_turn(to_frame(request)))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return await asyncio.shield(task)  # a client that leaves must not leave a half-done exchange behind

    def close(self) -> None:
        """Kill the process and wait for its end."""
        for task in self._requests:
            task.cancel()
        if self._process is not None:
            self._process.kill()
            self._process.reap()
            self._process = None

    def _new_process(self) -> "ChildProcess[R]":
        return ChildProcess(self._module, self._setup, self._reply)

    async def _ask_in_turn(self, frame: bytes) -> R:
        async with self._turn:
            try:
                return await self._ask(frame)
            except EOFError:  # it died between two requests, or this one killed it
                pass
            try:
                return await self._ask(frame)
            except EOFError as error:
                raise ChildDied from error

    async def _ask(self, frame: bytes) -> R:
        process = self._process if self._process is not None and self._process.is_alive else self._new_process()
        self._process = process
        limit = START_SECONDS
        try:
            async with asyncio.timeout(limit):
                await process.wait_until_ready()
            limit = self._setup.seconds
            async with asyncio.timeout(limit):
                return await process.ask(frame)
        except TimeoutError:
            logger.warning("killed %s: it took longer than %g s", self._module, limit)
            await self._drop(process)
            raise ChildTimeout(limit) from None
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            logger.warning("%s has ended: %s", self._module, error)
            await self._drop(process)
            raise EOFError from error

    async def _drop(self, process: "ChildProcess[R]") -> None:
        self._process = None
        process.kill()
        await asyncio.to_thread(process.reap)


class ChildProcess(Generic[R]):
    """One process and the socket to it."""

    def __init__(self, module: str, setup: ChildSetup, reply: type[R]) -> None:
        self._reply = reply
        self._socket, theirs = socket.socketpair()
        self._setup_frame = to_frame(setup)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        command = [sys.executable, "-P", "-m", f"millstream.tokenizer_manager.{module}"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=child_environment()
            )

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def wait_until_ready(self) -> None:
        """Send the setup and read what came of it, once."""
        if self._streams is None:
            self._socket.setblocking(False)
            self._streams = await asyncio.open_connection(sock=self._socket)
            reply = await self.ask(self._setup_frame)
            if reply.error is not None:
                logger.warning("%s", reply.error)

    async def ask(self, frame: bytes) -> R:
        """Send a frame and read the reply; EOFError or OSError if the process is gone."""
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=self._reply)

    def kill(self) -> None:
        """End the process at once and close the socket."""
        self._process.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()

    def reap(self) -> None:
        """Wait for the end of a killed process."""
        try:
            self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end", self._process.pid)
