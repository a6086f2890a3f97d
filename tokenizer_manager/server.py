"""The main process: HTTP from the first moment, the launcher beside it, and how a server ends."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys

import uvloop
from aiohttp import web

from ..common.flags import ConfigError
from ..common.links import MANAGER
from ..common.logs import set_up_logging
from ..common.model_error import ModelError
from ..common.settings import Settings, shown_args
from .access import Access, load_access
from .app import build_app
from .boot import Boot, first
from .children import Entries
from .http_server import HTTPRunner
from .launcher import ServerFailed, on_signals
from .served_model import ServedModel, find_served_model
from .startup_report import print_plan, print_ready

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_FORCED = 128 + signal.SIGTERM
FAREWELL_SECONDS = 0.7  # how long clients get to read their last event

logger = logging.getLogger(__name__)


def serve(settings: Settings, listener: socket.socket, entries: Entries | None = None) -> int:
    """Run a server until it ends; returns the exit code. The cause of a failure is the last line printed."""
    set_up_logging(settings.args.log_level, MANAGER)
    try:
        access = load_access(settings.args, listener.getsockname()[0])
        model = find_served_model(settings.args)
        print_plan(model.plan(_url(listener)) | {"keys": access.summary} | settings.lines())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(model, settings.origins, access, listener, entries or Entries()))
    except (ConfigError, ModelError) as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except ServerFailed as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _run(
    model: ServedModel, origins: dict[str, str], access: Access, listener: socket.socket, entries: Entries
) -> int:
    return await Server(model, origins, access, listener, entries).run()


class Server:
    """One boot of the server: starting, running, draining, gone."""

    def __init__(
        self, model: ServedModel, origins: dict[str, str], access: Access, listener: socket.socket, entries: Entries
    ) -> None:
        self._model = model
        self._access = access
        self._args = model.args
        self._origins = origins
        self._listener = listener
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._boot = Boot(model, entries)
        self._manager = self._boot.manager
        self._launcher = self._boot.launcher

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit code. Raises ServerFailed with the cause of a failure."""
        with on_signals(self._signals.put_nowait):
            http = await self._start_http()
            try:
                return await self._live()
            finally:
                await self._close(http)

    async def _live(self) -> int:
        if await first(self._signals.get(), self._start_up()) == 0:
            return 0
        await first(self._signals.get(), self._launcher.wait_for_failure())
        return await self._drain()

    async def _start_up(self) -> None:
        await self._boot.start_up()
        gc.freeze()  # what is loaded stays: a collection that walked it would hold up every stream
        needs_key = bool(self._args.api_key or self._args.api_key_file)
        print_ready(_url(self._listener), self._model.name, needs_key=needs_key)

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
        info = {"args": shown_args(self._args), "origins": self._origins}
        app = build_app(
            self._manager,
            self._boot.renderer,
            family=self._model.family,
            info=info,
            access=self._access,
            max_body_bytes=self._args.max_body_bytes,
            strict_params=self._args.strict_params,
            keep_alive_seconds=self._args.sse_keep_alive_interval,
        )
        runner = HTTPRunner(app)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        return runner

    async def _close(self, http: HTTPRunner) -> None:
        """Let clients read their last event, then end HTTP, the children and the template process."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._manager.wait_idle(), FAREWELL_SECONDS)
        await http.cleanup()
        await self._boot.close()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
