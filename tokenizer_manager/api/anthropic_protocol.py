"""Bodies of Anthropic's routes: what is decoded, what is refused, and what of it is sampling."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...common.sampling_params import SamplingParams
from ..api_error import bad_request
from ..json_body import CacheSalt, Int32, Int64, Label, Temperature, check_unsupported
from .sampling_fields import SamplingBase, stop_strings

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "inference_geo": (),
    "speed": ("standard",),
}
SAMPLING_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}


class ContentBlock(msgspec.Struct, kw_only=True):
    """A piece of a message: its `type` says which of the other fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn; the last may be the beginning of the assistant's answer."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(msgspec.Struct, kw_only=True):
    """A tool of the client's (`type` absent or custom); those that Anthropic runs or defines are ignored."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, where its chat template knows the switch; a budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int64 | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """Structured output."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How the answer is to look; `effort` is ignored."""

    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Who asks; it changes nothing."""

    user_id: str | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what makes a prompt."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        check_unsupported(self, {name: NEUTRAL[name] for name in NEUTRAL if name in self.__struct_fields__})
        if self.tool_choice is not None and self.tool_choice.type == "tool" and not self.tool_choice.name:
            raise bad_request("tool_choice.name is required", "tool_choice.name", "missing_field")


class MessagesRequest(PromptBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int64
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: Metadata | None = None
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    rid: Label | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None

    def sampling_params(self, base: SamplingBase) -> SamplingParams:
        """APIError for what is out of range."""
        given = {
            "max_new_tokens": self.max_tokens,
            "stop": stop_strings(self.stop_sequences),
            **{name: getattr(self, name) for name in ("temperature", "top_p", "top_k")},
        }
        return base.params(given, SAMPLING_NAMES)
