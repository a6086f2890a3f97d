"""One boot of all processes, with or without HTTP: the tokenizer manager of this process, and the launcher of the others."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from ..common.flags import ConfigError
from ..common.links import ToScheduler
from ..common.tokenizer import load_tokenizer
from .children import Entries
from .launcher import Launcher
from .metrics import Metrics
from .sandbox.template_pool import TemplateRenderer
from .served_model import ServedModel
from .tokenizer_manager import TokenizerManager


class Boot:
    """Make it in the event loop that it will live in, `start_up`, and `close` it in any case.

    `tells_cause`: whether failed requests are told of why the server has failed.
    """

    def __init__(self, model: ServedModel, entries: Entries, *, tells_cause: bool = False) -> None:
        args = model.args
        self._model = model
        self.renderer = TemplateRenderer()
        self.manager = TokenizerManager(
            served_model_names=model.names,
            send=self._send,
            is_full=lambda: self.launcher.is_full,
            metrics=Metrics(model.name),
            random_seed=args.random_seed,
            log_requests=args.log_requests,
            max_queued_requests=args.max_queued_requests,
            max_queued_tokens=args.max_queued_tokens,
            request_waiting_timeout=args.request_waiting_timeout,
            request_timeout=args.request_timeout,
            enable_priority_scheduling=args.enable_priority_scheduling,
            sampling_defaults=model.sampling_defaults,
            incremental_streaming_output=args.incremental_streaming_output,
        )
        self.launcher = Launcher(args, self.manager, entries, model.weights.keeps_dense, tells_cause=tells_cause)

    async def start_up(self) -> None:
        """Start the children and return when they take work.

        ServerFailed, as `launcher.wait_for_failure`; ConfigError where the template of --chat-template does not compile.
        """
        self.launcher.start()
        tokenizer = await asyncio.to_thread(load_tokenizer, self._model.path)
        self.renderer.start(self._model.chat_templates, tokenizer.special_tokens)
        self.manager.grammars.start(self._model.path)
        self.manager.set_tokenizer(tokenizer)
        await first(self._wait_until_ready(), self.launcher.wait_for_failure())

    async def close(self) -> None:
        """End the children and the processes of templates and grammars."""
        self.renderer.close()
        self.manager.grammars.close()
        await self.launcher.close()

    async def _wait_until_ready(self) -> None:
        file = self._model.args.chat_template
        if file and (error := await self.renderer.setup_error()):
            raise ConfigError(f"--chat-template {file}: {error}")
        await self.manager.wait_until_ready()

    def _send(self, message: ToScheduler) -> None:
        self.launcher.send(message)


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
