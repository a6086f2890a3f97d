"""A live server of a model that reasons and calls tools as Qwen's do; what it answers is the last message."""

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.template_habits import TemplateHabits
from tests.tokenizer_manager.live_server import END, LiveServer


class LastMessageRenderer:
    """A chat template that shows the last message, so that the echo is an answer; it keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.kwargs: Mapping[str, Any] | None = None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        self.messages, self.tools, self.kwargs = list(messages), tools, chat_template_kwargs
        return f"{messages[-1]['content']}{END}"


class AgentServer(LiveServer):
    """Its context is long enough for a few calls."""

    def __init__(self) -> None:
        self.renderer = LastMessageRenderer()
        family = ChatFamily("hermes", "think", TemplateHabits(takes_tools=True, takes_tool_calls=True))
        super().__init__(renderer=self.renderer, http={"family": family})
        self.backend.context_len = 1000
