"""An event loop in a thread of its own, with one boot of all processes in it: what Engine talks to."""

import asyncio
import contextlib
import os
import secrets
import threading
from array import array
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvloop

from ..common.flags import ConfigError
from .api.embedding_service import EmbeddingRequest, EmbeddingService
from .api.generate_protocol import GenerateBody
from .api.generate_service import GenerateService
from .boot import Boot, first
from .call import Call
from .children import Entries
from .launcher import ServerFailed
from .served_model import ServedModel

T = TypeVar("T")

FORKED = "it belongs to the process that this one was forked from"


class EngineEnded(RuntimeError):
    """The engine was shut down or has failed; the message has the cause."""


class EngineThread:
    """Starts with the object; `start_up` waits until it takes work. The thread starts the children, so it outlives them.

    It is a daemon, so that a program which forgets to shut it down still ends; the children end with it in any case.
    """

    def __init__(self, model: ServedModel, entries: Entries) -> None:
        self._model = model
        self._entries = entries
        self._ready: Future[None] = Future()
        self._cause = "it was shut down"
        self._ends = threading.RLock()  # held while something is handed to the loop, and while it is said to have ended
        self._has_ended = False
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._boot: Boot
        self._thread = threading.Thread(target=self._run, name="millstream-engine", daemon=True)
        self._thread.start()

    def start_up(self) -> None:
        """Wait until it takes work; ServerFailed with the cause if it can't, ConfigError if an argument is why."""
        self._ready.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the loop; EngineEnded where there is none any more."""
        cause = FORKED
        if os.getpid() == self._pid:
            with self._ends:
                if not self._has_ended:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            cause = self._cause
        coroutine.close()
        raise EngineEnded(f"the engine has ended: {cause}")

    def shut_down(self) -> None:
        """End all processes and wait for that; again does nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def whole(self, body: GenerateBody) -> Any:
        """The answer to a body, as /generate gives it."""
        with self._boot.manager.open_call():
            async with self._service.start(self._new_call(), body) as answers:
                return _plain(await answers.whole())

    async def embed(self, body: EmbeddingRequest) -> list[list[float]]:
        """The vector of each input, as /v1/embeddings gives them."""
        with self._boot.manager.open_call():
            found = await self._embedding_service.embed(self._new_call(), body)
        return [array("f", vector).tolist() for vector in found.vectors]

    def stream(self, body: GenerateBody) -> "EngineStream":
        """The events of a body, as /generate sends them."""
        return EngineStream(self._events(body))

    async def _events(self, body: GenerateBody) -> AsyncGenerator[dict[str, Any], None]:
        with self._boot.manager.open_call():
            async with (
                self._service.start(self._new_call(), body) as answers,
                contextlib.aclosing(answers.events()) as events,
            ):
                async for event in events:
                    yield _plain(event)

    def _new_call(self) -> Call:
        return Call(self._boot.manager.clock(), secrets.token_hex(12))

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._boot = Boot(self._model, self._entries, tells_cause=True)
        self._service = GenerateService(self._boot.manager)
        self._embedding_service = EmbeddingService(self._boot.manager)
        try:
            if await first(self._stop.wait(), self._boot.start_up()) == 1:
                self._ready.set_result(None)
                await first(self._stop.wait(), self._boot.launcher.wait_for_failure())
        except ServerFailed as error:
            self._cause = str(error)
        except ConfigError as error:
            self._cause = str(error)
            self._ready.set_exception(error)
        finally:
            await self._end()

    async def _end(self) -> None:
        """Whoever waits for an answer gets an error; what is in the loop ends."""
        with self._ends:
            self._has_ended = True
        if not self._ready.done():
            self._ready.set_exception(ServerFailed(self._cause))
        self._boot.manager.fail_all(f"The engine has ended: {self._cause}.")
        await self._boot.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class EngineStream:
    """A stream that is taken from in other threads: an event holds all that has come since the one before."""

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        self._events = events
        self._taking: asyncio.Task[dict[str, Any] | None] | None = None

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        self._taking = asyncio.ensure_future(self._take())
        return await self._taking

    async def close(self) -> None:
        """Abort what has not ended."""
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
        await self._events.aclose()

    async def _take(self) -> dict[str, Any] | None:
        return await anext(self._events, None)


def _plain(value: Any) -> Any:
    """A value that is ready for JSON, as a client would decode it."""
    return msgspec.json.decode(msgspec.json.encode(value))
