"""Chat templates, rendered in a killable child process so that none of them can stall or exhaust the server.

One child renders one chat at a time; others wait their turn. A render that takes too long, or takes the child down with
it, ends in a TemplateError, and the next one gets a new child. A request brings data only, never a template.
"""

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..common.config import child_environment
from .template_messages import LENGTH_BYTES, MAX_FRAME_BYTES, RenderReply, RenderRequest, RenderSetup, to_frame

RENDER_SECONDS = 2.0
START_SECONDS = 60.0
REAP_SECONDS = 2.0
MEMORY_BYTES = 256 * 2**20
MAX_OUTPUT_CHARS = 16 * 2**20
RESERVED_NAMES = frozenset(
    {"chat_template", "messages", "conversation", "conversations", "tools", "documents", "tokenize", "self"}
    | {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"}
)

logger = logging.getLogger(__name__)


class TemplateError(ValueError):
    """A chat cannot be rendered: the message is for the client, `param` names the field of its request."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class TemplateRenderer:
    """Renders chats with the model's templates. Make it, `start` it, and use it in the main thread's event loop."""

    def __init__(self, *, render_seconds: float = RENDER_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._render_seconds = render_seconds
        self._memory_bytes = memory_bytes
        self._setup: RenderSetup | None = None
        self._child: TemplateChild | None = None
        self._turn = asyncio.Lock()
        self._renders: set[asyncio.Task[RenderReply]] = set()

    def start(self, chat_templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Start the child, which gets ready in the background; without templates there is none."""
        self._setup = RenderSetup(
            chat_templates=dict(chat_templates),
            special_tokens=dict(special_tokens),
            render_seconds=self._render_seconds,
            memory_bytes=self._memory_bytes,
            max_output_chars=MAX_OUTPUT_CHARS,
        )
        if chat_templates:
            self._child = TemplateChild(self._setup)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat; TemplateError if the template refuses it or cannot render it within its limits."""
        setup = self._setup
        if setup is None or not setup.chat_templates:
            raise TemplateError("this model has no chat template")
        if add_generation_prompt and continue_final_message:
            raise TemplateError(
                "only one of add_generation_prompt and continue_final_message", "continue_final_message"
            )
        kwargs = check_template_kwargs(chat_template_kwargs or {}, setup.special_tokens)
        request = RenderRequest(
            messages=[dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None if documents is None else [dict(document) for document in documents],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=kwargs,
        )
        task = asyncio.ensure_future(self._render_in_turn(setup, to_frame(request)))
        self._renders.add(task)
        task.add_done_callback(self._renders.discard)
        reply = await asyncio.shield(task)  # a client that leaves must not leave a half-done exchange behind
        if reply.error is not None:
            raise TemplateError(reply.error)
        return reply.text

    def close(self) -> None:
        """Kill the child and wait for its end."""
        for task in self._renders:
            task.cancel()
        if self._child is not None:
            self._child.kill()
            self._child.reap()
            self._child = None

    async def _render_in_turn(self, setup: RenderSetup, frame: bytes) -> RenderReply:
        async with self._turn:
            try:
                return await self._ask_child(setup, frame)
            except EOFError:  # it died between two chats, or this chat killed it
                pass
            try:
                return await self._ask_child(setup, frame)
            except EOFError:
                return RenderReply(error="the chat template's process died of this chat")

    async def _ask_child(self, setup: RenderSetup, frame: bytes) -> RenderReply:
        child = self._child if self._child is not None and self._child.is_alive else TemplateChild(setup)
        self._child = child
        limit = START_SECONDS
        try:
            async with asyncio.timeout(limit):
                await child.wait_until_ready()
            limit = self._render_seconds
            async with asyncio.timeout(limit):
                return await child.ask(frame)
        except TimeoutError:
            logger.warning("killed the chat template's process: it took longer than %g s", limit)
            await self._drop_child(child)
            return RenderReply(error=f"the chat template took longer than {limit:g} s")
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            logger.warning("the chat template's process has ended: %s", error)
            await self._drop_child(child)
            raise EOFError from error

    async def _drop_child(self, child: "TemplateChild") -> None:
        self._child = None
        child.kill()
        await asyncio.to_thread(child.reap)


class TemplateChild:
    """One child process and the socket to it."""

    def __init__(self, setup: RenderSetup) -> None:
        self._socket, theirs = socket.socketpair()
        self._setup_frame = to_frame(setup)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        command = [sys.executable, "-P", "-m", "millstream.tokenizer_manager.template_child"]
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
        """Send the templates and read what came of them, once."""
        if self._streams is None:
            self._socket.setblocking(False)
            self._streams = await asyncio.open_connection(sock=self._socket)
            reply = await self.ask(self._setup_frame)
            if reply.error is not None:
                logger.warning("%s", reply.error)

    async def ask(self, frame: bytes) -> RenderReply:
        """Send a frame and read the reply; EOFError or OSError if the process is gone."""
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        if size > MAX_FRAME_BYTES:
            raise EOFError(f"a frame of {size} bytes")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=RenderReply)

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


def _is_plain(value: object) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str | float)


def check_template_kwargs(kwargs: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """`chat_template_kwargs` is plain data under names of its own; TemplateError names the entry that is not."""
    for name, value in kwargs.items():
        if not name.isidentifier() or name.startswith("_") or name in RESERVED_NAMES or name in special_tokens:
            raise TemplateError(f"chat_template_kwargs must not set {name[:100]!r}", "chat_template_kwargs")
        values = value if isinstance(value, list) else [value]
        if not all(map(_is_plain, values)):
            raise TemplateError(
                f"chat_template_kwargs: {name[:100]!r} must be a plain value or a list of plain values",
                "chat_template_kwargs",
            )
    return dict(kwargs)
