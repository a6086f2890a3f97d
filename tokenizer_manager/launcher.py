"""The launcher: a task beside HTTP that starts the children, joins them to the tokenizer manager, and ends them.

A server ends in one of three ways: a child dies (or goes silent) and the server fails with its cause; a signal drains
it; a second signal ends it at once.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
from collections.abc import Callable

from ..common.channel import Hub, LostMessage, Receiver, Sender
from ..common.config import ServerArgs
from ..common.links import (
    MANAGER,
    FromDetokenizer,
    FromScheduler,
    ToScheduler,
    detokenizer_to_manager,
    manager_to_scheduler,
    scheduler_to_manager,
)
from ..common.messages import LoadProgress, SchedulerReady
from ..common.run_dir import create_run_dir
from .children import Children, Entries
from .startup_report import LoadingBar
from .tokenizer_manager import TokenizerManager

FLUSH_SECONDS = 0.005
HEARTBEAT_CHECK_SECONDS = 1.0
FAILED = "The server has failed and is shutting down; its log says why."

logger = logging.getLogger(__name__)


class ServerFailed(Exception):
    """The server must end; the message is the cause that a person needs."""


class Launcher:
    """The children of one boot and their links to the tokenizer manager."""

    def __init__(
        self, args: ServerArgs, manager: TokenizerManager, entries: Entries, keeps_dense: bool, *, tells_cause: bool
    ) -> None:
        self._args = args
        self._manager = manager
        self._tells_cause = tells_cause
        self._loop = asyncio.get_running_loop()
        self._run_dir, self._lock = create_run_dir()
        instance_id = secrets.randbits(64)
        self._hub = Hub(self._run_dir, instance_id)
        self._to_scheduler: Sender = self._hub.open_sender(manager_to_scheduler())
        self._from_scheduler: Receiver[FromScheduler] = self._hub.open_receiver(scheduler_to_manager(), FromScheduler)
        self._from_detokenizer: Receiver[FromDetokenizer] = self._hub.open_receiver(
            detokenizer_to_manager(), FromDetokenizer
        )
        self._children = Children(args, self._run_dir, instance_id, entries, keeps_dense)
        self._bar = LoadingBar(args.tp_size)
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._flush_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the children and listen to them."""
        self._hub.watch(self._loop.add_reader, self._on_readable)
        self._children.start()
        self._children.watch(self.fail)
        self._on_readable()

    def send(self, message: ToScheduler) -> None:
        """Send to the scheduler; never blocks. What its socket does not take is flushed by a timer."""
        self._to_scheduler.send(message)
        self._flush_later()

    @property
    def is_full(self) -> bool:
        """Whether the link to the scheduler takes no new request."""
        return self._to_scheduler.is_full

    async def wait_for_failure(self) -> None:
        """Never returns; raises ServerFailed when a child dies or goes silent."""
        while True:
            await asyncio.wait([self._failure], timeout=HEARTBEAT_CHECK_SECONDS)
            if self._failure.done():
                self._failure.result()
            self._manager.metrics.count_dropped_frames(MANAGER, self._hub.num_dropped)
            silent, name = self._manager.silent_seconds, self._manager.silent_process
            if silent > self._args.watchdog_timeout:
                self.fail(f"{name} has been silent for {silent:.0f} s (--watchdog-timeout)")

    def fail(self, cause: str) -> None:
        """Record the first cause for which the server must end, and tell every waiting client at once."""
        if self._failure.done():
            return
        logger.error("%s", cause)
        self._failure.set_exception(ServerFailed(cause))
        self._failure.exception()  # it may be that nobody waits for it any more
        self._manager.fail_all(f"The server has failed: {cause}" if self._tells_cause else FAILED)

    async def close(self) -> None:
        """End the children and remove the run directory."""
        self._bar.finish()
        if self._flush_timer:
            self._flush_timer.cancel()
        os.close(self._lock)  # so that the last child removes the directory, also if we are killed meanwhile
        await self._children.stop()
        for fd in self._hub.file_descriptors:
            self._loop.remove_reader(fd)
        self._hub.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _on_readable(self) -> None:
        try:
            while messages := [*self._from_scheduler.drain(), *self._from_detokenizer.drain()]:
                for message in messages:
                    self._receive(message)
        except LostMessage as error:
            self.fail(str(error))
        except Exception as error:
            logger.exception("a message could not be handled")
            self.fail(f"{MANAGER} failed: {type(error).__name__}: {error}")

    def _receive(self, message: FromScheduler | FromDetokenizer) -> None:
        self._manager.on_message(message)
        match message:
            case LoadProgress():
                self._bar.update(message)
            case SchedulerReady():
                self._bar.finish()

    def _flush_later(self) -> None:
        if self._to_scheduler.num_pending and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        self._to_scheduler.flush()
        self._flush_later()


def on_signals(handler: Callable[[signal.Signals], None]) -> contextlib.ExitStack:
    """Call the handler for SIGTERM, SIGINT and SIGHUP; leaving the stack restores the default."""
    loop = asyncio.get_running_loop()
    stack = contextlib.ExitStack()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, handler, number)
        stack.callback(loop.remove_signal_handler, number)
    return stack
