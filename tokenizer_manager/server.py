"""The main process: HTTP from the first moment, the launcher beside it, and how a server ends."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from ..common.config import ServerArgs
from ..common.flags import ConfigError
from ..common.links import MANAGER, ToScheduler
from ..common.logs import set_up_logging
from ..common.model_error import ModelError
from ..common.tokenizer import load_tokenizer
from .app import build_app
from .children import Entries
from .http_server import HTTPRunner
from .launcher import Launcher, ServerFailed, on_signals
from .metrics import Metrics
from .served_model import ServedModel, find_served_model
from .startup_report import print_plan, print_ready
from .template_pool import TemplateRenderer
from .tokenizer_manager import TokenizerManager

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_FORCED = 128 + signal.SIGTERM
FAREWELL_SECONDS = 0.7  # how long clients get to read their last event

logger = logging.getLogger(__name__)


def serve(args: ServerArgs, listener: socket.socket, entries: Entries | None = None) -> int:
    """Run a server until it ends; returns the exit code. The cause of a failure is the last line printed."""
    set_up_logging(args.log_level, MANAGER)
    try:
        model = find_served_model(args)
        print_plan(model.plan(_url(listener)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(model, listener, entries or Entries()))
    except (ConfigError, ModelError) as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except ServerFailed as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _run(model: ServedModel, listener: socket.socket, entries: Entries) -> int:
    return await Server(model, listener, entries).run()


class Server:
    """One boot of the server: starting, running, draining, gone."""

    def __init__(self, model: ServedModel, listener: socket.socket, entries: Entries) -> None:
        self._model = model
        self._args = model.args
        self._listener = listener
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._renderer = TemplateRenderer()
        self._manager = TokenizerManager(
            served_model_names=[model.name],
            send=self._send,
            is_full=lambda: self._launcher.is_full,
            metrics=Metrics(model.name),
            random_seed=self._args.random_seed,
            log_requests=self._args.log_requests,
            max_queued_requests=self._args.max_queued_requests,
            max_queued_tokens=self._args.max_queued_tokens,
            enable_priority_scheduling=self._args.enable_priority_scheduling,
        )
        self._launcher = Launcher(self._args, self._manager, entries, model.weights.keeps_dense)

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit code. Raises ServerFailed with the cause of a failure."""
        with on_signals(self._signals.put_nowait):
            http = await self._start_http()
            try:
                return await self._live()
            finally:
                await self._close(http)

    def _send(self, message: ToScheduler) -> None:
        self._launcher.send(message)

    async def _live(self) -> int:
        if await first(self._signals.get(), self._start_up()) == 0:
            return 0
        await first(self._signals.get(), self._launcher.wait_for_failure())
        return await self._drain()

    async def _start_up(self) -> None:
        self._launcher.start()
        tokenizer = await asyncio.to_thread(load_tokenizer, self._model.path)
        self._renderer.start(self._model.chat_templates or tokenizer.chat_templates, tokenizer.special_tokens)
        self._manager.set_tokenizer(tokenizer)
        await first(self._manager.wait_until_ready(), self._launcher.wait_for_failure())
        gc.freeze()  # what is loaded stays: a collection that walked it would hold up every stream
        print_ready(_url(self._listener), self._model.name)

    async def _drain(self) -> int:
        self._manager.start_draining()
        if self._manager.num_inflight:
            logger.info(
                "draining for up to %g s (requests running: %d); a second signal ends at once",
                self._args.drain_timeout,
                self._manager.num_inflight,
            )
        idle, again = self._manager.wait_idle(), self._signals.get()
        ended = await first(idle, again, self._launcher.wait_for_failure(), timeout=self._args.drain_timeout)
        if ended == 0:
            return 0
        self._manager.fail_all("The server was stopped before the request ended.")
        return 0 if ended is None else EXIT_FORCED

    async def _start_http(self) -> HTTPRunner:
        info = msgspec.to_builtins(self._args)
        app = build_app(self._manager, self._renderer, info=info, max_body_bytes=self._args.max_body_bytes)
        runner = HTTPRunner(app)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        return runner

    async def _close(self, http: HTTPRunner) -> None:
        """Let clients read their last event, then end HTTP, the children and the template process."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._manager.wait_idle(), FAREWELL_SECONDS)
        await http.cleanup()
        self._renderer.close()
        await self._launcher.close()


async def first(*coroutines: Coroutine[Any, Any, Any], timeout: float | None = None) -> int | None:  # noqa: ASYNC109
    """The index of the first coroutine to end (raising what it raised), or None at the timeout; cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return next((index for index, task in enumerate(tasks) if task in done), None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
