"""The process that renders chat templates: it may be killed at any time, and nothing is lost.

A template comes with the model and is a program. It runs in transformers' immutable sandbox, under limits of memory and
CPU time that the kernel keeps, in a process without open files, whose parent gives it a few seconds a chat. Start it as
`python -m millstream.tokenizer_manager.sandbox.template_child`, with one socket as its standard input.
"""

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...common.tokenizer_parts import DEFAULT_TEMPLATE
from .killable_process import answer_until_closed, die_with_parent, read_message
from .template_messages import RenderReply, RenderRequest, RenderSetup

MAX_ERROR_CHARS = 500
TOOL_TEMPLATE = "tool_use"


def main() -> None:
    """Load the renderer, read the templates, say ready, answer chats until end-of-file."""
    die_with_parent("ms:templates")
    renderer = importlib.import_module("transformers.utils.chat_template_utils")
    setup = read_message(RenderSetup)
    answer_until_closed(setup, RenderRequest, partial(check_templates, renderer), partial(answer, renderer))


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
    return RenderReply(text=text)


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


if __name__ == "__main__":
    main()
