"""The process that renders chat templates: it may be killed at any time, and nothing is lost.

A template comes with the model and is a program. It runs in transformers' immutable sandbox, under limits of memory and
CPU time that the kernel keeps, in a process without open files, whose parent gives it a few seconds a chat. Start it as
`python -m millstream.tokenizer_manager.template_child`, with one socket as its standard input.
"""

import ctypes
import importlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..common.tokenizer_parts import DEFAULT_TEMPLATE
from .template_messages import LENGTH_BYTES, RenderReply, RenderRequest, RenderSetup, to_frame

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
CHANNEL = 0
MAX_ERROR_CHARS = 500
TOOL_TEMPLATE = "tool_use"

M = TypeVar("M")


def main() -> None:
    """Load the renderer, read the templates, say ready, answer chats until end-of-file."""
    die_with_parent()
    renderer = importlib.import_module("transformers.utils.chat_template_utils")
    setup = read_message(RenderSetup)
    limit_resources(setup)
    limit_cpu(setup.render_seconds)
    write_reply(check_templates(renderer, setup))
    while True:
        request = read_message(RenderRequest)
        limit_cpu(setup.render_seconds)
        write_reply(answer(renderer, setup, request))


def die_with_parent() -> None:
    """Be killed when the parent dies, and leave Ctrl-C and SIGTERM to it."""
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, b"ms:templates", 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if parent == 1 or os.getppid() != parent:
        sys.exit(0)


def limit_resources(setup: RenderSetup) -> None:
    """From now on: so much more memory, no file that grows, no core dump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + setup.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process if the next render uses much more CPU time than its parent would wait."""
    most = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def check_templates(renderer: Any, setup: RenderSetup) -> RenderReply:
    """Compile every template (transformers keeps the compiled ones)."""
    for name, template in setup.chat_templates.items():
        try:
            renderer._compile_jinja_template(template)
        except Exception as error:  # noqa: BLE001 - constants are computed here, so anything may go wrong
            return RenderReply(error=f"the chat template {name!r} does not compile: {describe(error)}")
    return RenderReply()


def answer(renderer: Any, setup: RenderSetup, request: RenderRequest) -> RenderReply:
    """Render one chat."""
    try:
        text = render(renderer, setup, request)
    except MemoryError:
        return RenderReply(error="the chat template needs too much memory for this chat")
    except Exception as error:  # noqa: BLE001 - whatever a template does, it is an answer
        return RenderReply(error=describe(error))
    if len(text) > setup.max_output_chars:
        return RenderReply(error=f"the rendered chat has {len(text)} characters, more than {setup.max_output_chars}")
    return RenderReply(text)


def render(renderer: Any, setup: RenderSetup, request: RenderRequest) -> str:
    """What `apply_chat_template` renders for this chat, keys without a value dropped from its messages."""
    rendered, _ = renderer.render_jinja_template(
        conversations=[[without_nones(message) for message in request.messages]],
        tools=request.tools,
        documents=request.documents,
        chat_template=choose_template(setup.chat_templates, request),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        **{**setup.special_tokens, **request.chat_template_kwargs},
    )
    text: str = rendered[0]
    return text


def choose_template(templates: Mapping[str, str], request: RenderRequest) -> str:
    """The model's template for tools where it has one and there are tools."""
    has_tool_template = request.tools is not None and TOOL_TEMPLATE in templates
    return templates[TOOL_TEMPLATE if has_tool_template else DEFAULT_TEMPLATE]


def without_nones(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that say nothing."""
    return {key: value for key, value in message.items() if value is not None}


def describe(error: Exception) -> str:
    """One line: what the template said with `raise_exception`, or what went wrong in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    is_own_message = type(error).__name__ in ("TemplateError", "ValueError")
    return (text if is_own_message else f"{type(error).__name__}: {text}")[:MAX_ERROR_CHARS]


def read_message(kind: type[M]) -> M:
    """The next frame; ends the process at end-of-file."""
    size = int.from_bytes(read_exactly(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(read_exactly(size), type=kind)


def read_exactly(size: int) -> bytes:
    """`size` bytes from the parent."""
    body = bytearray()
    while len(body) < size:
        piece = os.read(CHANNEL, min(size - len(body), 2**20))
        if not piece:
            sys.exit(0)
        body += piece
    return bytes(body)


def write_reply(reply: RenderReply) -> None:
    """Send a frame to the parent."""
    rest = memoryview(to_frame(reply))
    while rest:
        rest = rest[os.write(CHANNEL, rest) :]


if __name__ == "__main__":
    main()
