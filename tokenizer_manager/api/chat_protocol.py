"""The body of POST /v1/chat/completions, and the turn of a chat that it asks for."""

from typing import Any, Literal

import msgspec

from ...common.sampling_params import SamplingParams
from ..api_error import bad_request
from ..chat.chat_prompt import ChatMessage, reasoning_switches, template_messages
from ..chat.chat_service import ChatTurn
from ..chat.tool_choice import ToolChoice
from ..grammar.grammar_protocol import grammar_of
from ..json_body import Int64, check_unsupported, salt_of
from .logprob_fields import chat_logprobs
from .openai_protocol import NEUTRAL, OpenAIBody, check_stream_options, sampling_params_of
from .sampling_fields import SamplingBase

NEUTRAL_CHAT = {
    **NEUTRAL,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "chat_template": (),
    "echo": (False,),
    "web_search_options": (),
}


class Function(msgspec.Struct, kw_only=True):
    """A function of the client's; `parameters` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are known."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """Names a function."""

    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """The function that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatCompletionRequest(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    chat_template: Any = None
    echo: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        check_unsupported(self, NEUTRAL_CHAT)
        check_stream_options(self)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")

    @property
    def tool_choice_or_auto(self) -> ToolChoice:
        """`tool_choice` in the words of a ChatTurn."""
        if isinstance(self.tool_choice, NamedChoice):
            return {"name": self.tool_choice.function.name}
        return self.tool_choice or "auto"

    def sampling_params(self, base: SamplingBase) -> SamplingParams:
        """Without a limit the rest of the context may be filled."""
        if self.max_completion_tokens is not None:
            return sampling_params_of(self, self.max_completion_tokens, "max_completion_tokens", base)
        return sampling_params_of(self, self.max_tokens, "max_tokens", base)


def template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as a ChatTurn has it."""
    function = msgspec.to_builtins(tool.function)
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def chat_turn(body: ChatCompletionRequest, base: SamplingBase, label: str | None) -> ChatTurn:
    """What the body asks for; APIError names the field that is wrong."""
    body.check()
    return ChatTurn(
        messages=template_messages(body.messages),
        sampling_params=body.sampling_params(base),
        stream=bool(body.stream),
        tools=[template_tool(tool) for tool in body.tools or ()],
        tool_choice=body.tool_choice_or_auto,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        separate_reasoning=body.separate_reasoning,
        grammar=grammar_of(body),
        logprobs=chat_logprobs(body.logprobs, body.top_logprobs),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=reasoning_switches(body.reasoning_effort) | (body.chat_template_kwargs or {}),
        label=label,
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        priority=body.priority,
    )
