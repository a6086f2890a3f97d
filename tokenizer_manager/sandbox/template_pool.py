"""Chat templates, rendered in a killable child process so that none of them can stall or exhaust the server.

A render that takes too long, or takes the child down with it, ends in a TemplateError. A request brings data only, never
a template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .killable_child import ChildDied, ChildTimeout, KillableChild
from .template_messages import RenderReply, RenderRequest, RenderSetup

CHILD = "millstream.tokenizer_manager.sandbox.template_child"
RENDER_SECONDS = 2.0
MEMORY_BYTES = 256 * 2**20
MAX_OUTPUT_CHARS = 16 * 2**20
RESERVED_NAMES = frozenset(
    {"chat_template", "messages", "conversation", "conversations", "tools", "documents", "tokenize", "self"}
    | {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"}
)


class TemplateError(ValueError):
    """A chat cannot be rendered: the message is for the client, `param` names the field of its request."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class TemplateRenderer:
    """Renders chats with the model's templates. Make it, then `start` it, and use it in one event loop."""

    def __init__(self, *, render_seconds: float = RENDER_SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._render_seconds = render_seconds
        self._memory_bytes = memory_bytes
        self._setup: RenderSetup | None = None
        self._child: KillableChild[RenderReply] | None = None

    def start(self, chat_templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Start the child, which gets ready in the background; without templates there is none."""
        self._setup = RenderSetup(
            chat_templates=dict(chat_templates),
            special_tokens=dict(special_tokens),
            seconds=self._render_seconds,
            memory_bytes=self._memory_bytes,
            max_output_chars=MAX_OUTPUT_CHARS,
        )
        if chat_templates:
            self._child = KillableChild(CHILD, "chat templates", self._setup, RenderReply)
            self._child.start()

    async def setup_error(self) -> str | None:
        """Why a template can not be used, when the child has tried to compile them."""
        return await self._child.setup_error() if self._child is not None else None

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
        """The prompt of a chat; TemplateError if the template refuses it or cannot render it within its limits.

        APIError 503 where that is not the chat's fault.
        """
        setup, child = self._setup, self._child
        if setup is None or child is None:
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
        try:
            reply = await child.ask(request)
        except ChildTimeout as timeout:
            raise TemplateError(f"the chat template took longer than {timeout.seconds:g} s") from None
        except ChildDied:
            raise TemplateError("the chat template needs too much memory or time for this chat") from None
        if reply.error is not None:
            raise TemplateError(reply.error)
        return reply.text

    def close(self) -> None:
        """Kill the child and wait for its end."""
        if self._child is not None:
            self._child.close()
            self._child = None


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
