"""The body of OpenAI's Responses: what is decoded, what is refused, and what of it is sampling.

Nothing is stored: `store` may say what it likes, and the answer says false.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...common.logprobs import LogprobReq
from ...common.sampling_params import SamplingParams
from ..api_error import unsupported
from ..json_body import CacheSalt, Int32, Int64, Label, Temperature, check_unsupported
from .logprob_fields import chat_logprobs
from .sampling_fields import SamplingBase

STATELESS = "responses are not stored here; send the whole conversation as input, and leave {} out"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
}
STORED = frozenset({"previous_response_id", "conversation"})
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})  # the second is asked for by agents; no answer has it


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of an item's content: `type` is input_text, output_text, reasoning_text, summary_text or refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message (`type` may be absent), a function_call, a function_call_output or a reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function (`type` function); tools that OpenAI runs are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    """A function that must be called."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Structured output."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """How the text is to look; `verbosity` is ignored."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How much the model thinks, where its chat template knows the switch; summaries are not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Accepted, and without effect: no obfuscation is added."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses. `service_tier` and what is said of OpenAI's prompt cache are ignored."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Int64 | None = None
    max_tool_calls: Int64 | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    include: list[str] | None = None
    top_logprobs: Int64 | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    rid: Label | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    background: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    truncation: Any = None
    context_management: Any = None
    moderation: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        for name in STORED:
            if getattr(self, name) is not None:
                raise unsupported(name, STATELESS.format(name))
        check_unsupported(self, NEUTRAL)
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise unsupported(f"include[{index}]", f"include: {name[:100]!r} is not supported; leave it out")

    @property
    def logprobs(self) -> LogprobReq | None:
        """Of the answer's text, where they are asked for; APIError for a number that is out of range."""
        return chat_logprobs(LOGPROBS in (self.include or ()) or bool(self.top_logprobs), self.top_logprobs)

    def sampling_params(self, base: SamplingBase) -> SamplingParams:
        """Without a limit the rest of the context may be filled; APIError for what is out of range."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return base.params(given | {"max_new_tokens": self.max_output_tokens}, {"max_new_tokens": "max_output_tokens"})
