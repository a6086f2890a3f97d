"""A child process that may be killed at any time: what can stall or exhaust a process is done there.

One child answers one request at a time; others wait their turn. A request that takes too long, or takes the child down
with it, fails alone, and the next one gets a new child.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from typing import Generic, TypeVar

import msgspec

from ...common.config import child_environment
from ..api_error import unavailable
from .child_frames import LENGTH_BYTES, MAX_FRAME_BYTES, ChildReply, ChildSetup, to_frame

START_SECONDS = 60.0
TURN_SECONDS = 30.0  # how long a request may wait for its turn
REAP_SECONDS = 2.0
FROM_OUTSIDE = frozenset({0, -signal.SIGKILL})  # exit codes of what no request has done, as the kernel out of memory

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
R = TypeVar("R", bound=ChildReply)
logger = logging.getLogger(__name__)


class ChildTimeout(Exception):
    """The child was killed: it took longer than `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"longer than {seconds:g} s")
        self.seconds = seconds


class ChildDied(Exception):
    """The request took the child down with it."""


class ChildGone(Exception):
    """The child has ended, or could not start, and no request has done that."""


class KillableChild(Generic[R]):
    """The module `module` as a process, or the next one. `purpose` tells clients what it is for.

    Use it in one event loop: a process dies with the thread that started it.
    """

    def __init__(self, module: str, purpose: str, setup: ChildSetup, reply: type[R]) -> None:
        self._module = module
        self._purpose = purpose
        self._setup = setup
        self._reply = reply
        self._process: ChildProcess[R] | None = None
        self._turn = asyncio.Lock()
        self._exchange: asyncio.Task[R] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process, which gets ready in the background."""
        self._process = self._new_process()

    @property
    def pid(self) -> int | None:
        """The id of the process that runs, if any."""
        return self._process.pid if self._process is not None else None

    async def setup_error(self) -> str | None:
        """What the process says is wrong with its setup, when it is ready; None where it could not start, too."""
        async with self._turn:
            with contextlib.suppress(ChildGone):
                return (await self._ready_process()).setup_error
        return None

    async def ask(self, request: msgspec.Struct) -> R:
        """The child's answer; ChildTimeout or ChildDied where it is the request's fault, APIError 503 where it is not.

        Who is cancelled while others have their turn is dropped; a turn that has begun is not left half done.
        """
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise unavailable(f"The server is busy: {self._purpose} has too much to do.", "overloaded") from None
        self._exchange = asyncio.ensure_future(self._answer(to_frame(request)))
        self._exchange.add_done_callback(self._end_turn)
        return await asyncio.shield(self._exchange)

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._is_closed = True
        if self._exchange is not None:
            self._exchange.cancel()
        if self._process is not None:
            self._process.kill()
            self._process.reap()
            self._process = None

    def _end_turn(self, exchange: asyncio.Task[R]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # nobody may be there to be told

    def _new_process(self) -> "ChildProcess[R]":
        return ChildProcess(self._module, self._setup, self._reply)

    async def _answer(self, frame: bytes) -> R:
        """One more try for what was killed from outside, or found its child dead."""
        for _ in range(2):
            try:
                return await self._try(frame)
            except ChildGone as error:
                logger.warning("%s has ended: %s", self._module, error)
        raise unavailable(f"The process of {self._purpose} has ended or could not start.", "process_ended")

    async def _try(self, frame: bytes) -> R:
        process = await self._ready_process()
        try:
            async with asyncio.timeout(self._setup.seconds):
                return await process.ask(frame)
        except TimeoutError:
            logger.warning("killed %s: it took longer than %g s", self._module, self._setup.seconds)
            await self._drop(process)
            raise ChildTimeout(self._setup.seconds) from None
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            exit_code = await asyncio.to_thread(process.reap)
            await self._drop(process)
            if exit_code is None or exit_code in FROM_OUTSIDE:
                raise ChildGone(f"exit code {exit_code}") from error
            logger.warning("%s was ended by a request, with exit code %d", self._module, exit_code)
            raise ChildDied from error

    async def _ready_process(self) -> "ChildProcess[R]":
        """The process, alive when this returns; ChildGone where none gets ready."""
        if self._is_closed:
            raise ChildGone("closed")
        if self._process is not None and not self._process.is_alive:
            await self._drop(self._process)
        try:
            process = self._process = self._process or self._new_process()
        except OSError as error:
            raise ChildGone(str(error)) from error
        try:
            async with asyncio.timeout(START_SECONDS):
                await process.wait_until_ready()
        except (TimeoutError, EOFError, OSError, msgspec.MsgspecError) as error:
            await self._drop(process)
            raise ChildGone(f"it did not get ready: {error!r}") from error
        return process

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
        self.setup_error: str | None = None
        self._opening: asyncio.Task[Streams] | None = None
        self._streams: Streams | None = None
        command = [sys.executable, "-P", "-m", module]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=child_environment()
                )
            except OSError:
                self._socket.close()
                raise

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
            self._opening = asyncio.ensure_future(asyncio.open_connection(sock=self._socket))
            self._streams = await asyncio.shield(self._opening)  # half open, it could not be closed
            reply = await self.ask(self._setup_frame)
            self.setup_error = reply.error
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
        if self._opening is None:
            self._socket.close()
        elif self._opening.done():
            _abort(self._opening)
        else:
            self._opening.add_done_callback(_abort)

    def reap(self) -> int | None:
        """Wait for the end of a process that was killed, or has closed its socket; its exit code, as Popen has it."""
        try:
            return self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end", self._process.pid)
            return None


def _abort(opening: "asyncio.Task[Streams]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].transport.abort()
