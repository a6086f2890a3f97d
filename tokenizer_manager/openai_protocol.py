"""Bodies of the OpenAI routes: what is decoded, what is refused, and how it becomes sampling parameters.

Fields that we do not know are ignored, as OpenAI does. Fields that we know and do not support yet are refused, so
that nobody gets an answer to another question than theirs.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..common.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from ..common.stop_regex import compile_stop_regexes
from .api_error import bad_request
from .chat_prompt import ChatMessage
from .json_body import CacheSalt, Int32, Int64, Label, check_unsupported

MAX_PROMPTS = 128
COMPLETION_MAX_TOKENS = 16
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "regex": (),
    "ebnf": (),
    "spaces_between_special_tokens": (True,),
    "lora_path": (),
    "json_schema": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "return_hidden_states": (False,),
    "session_params": (),
    "custom_params": (),
    "custom_logit_processor": (),
}
NEUTRAL_CHAT = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "chat_template": (),
}
NEUTRAL_COMPLETION = {**NEUTRAL, "echo": (False,), "suffix": ("",), "prompt_embeds": ()}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What else a stream carries."""

    include_usage: bool | None = None


class OpenAIBody(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common, SGLang's and vLLM's extensions included."""

    model: str | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Any = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Label | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    regex: Any = None
    ebnf: Any = None
    lora_path: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    custom_params: Any = None
    custom_logit_processor: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    chat_template: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        check_unsupported(self, NEUTRAL_CHAT)
        _check_stream_options(self)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """Without a limit the rest of the context may be filled."""
        if self.max_completion_tokens is not None:
            return _sampling_params(self, self.max_completion_tokens, "max_completion_tokens", vocab_size)
        return _sampling_params(self, self.max_tokens, "max_tokens", vocab_size)


class CompletionRequest(OpenAIBody, kw_only=True):
    """POST /v1/completions; several prompts give as many choices."""

    prompt: str | list[str | int | list[int]]
    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        check_unsupported(self, NEUTRAL_COMPLETION)
        _check_stream_options(self)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return split_prompts(self.prompt, "prompt", MAX_PROMPTS)

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """OpenAI's default is 16 tokens."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return _sampling_params(self, max_tokens, "max_tokens", vocab_size)


def split_prompts(given: Any, param: str, limit: int) -> list[str | list[int]]:
    """A text, texts, ids or lists of ids -> one text or list of ids for each prompt; APIError for a mixture."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise bad_request(f"{param} mixes texts, token ids and lists", param, "invalid_type")
    if not given:
        raise bad_request(f"{param} must not be empty", param, "empty_prompt")
    if kinds == {int}:
        return [given]
    if len(given) > limit:
        raise bad_request(f"{param} holds at most {limit} prompts, not {len(given)}", param)
    return list(given)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """One stop string (or regex) or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def checked(params: SamplingParams, vocab_size: int, names: Mapping[str, str], at: str = "") -> SamplingParams:
    """The params, or the APIError that names the field as the client wrote it, below `at`."""
    try:
        check_sampling_params(params, vocab_size)
        if params.stop_regex:
            compile_stop_regexes(params.stop_regex)
    except InvalidParam as error:
        message = str(error)
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
        param = names.get(error.param, error.param)
        raise bad_request(message, f"{at}.{param}" if at else param) from None
    return params


def _sampling_params(body: OpenAIBody, max_tokens: int | None, max_name: str, vocab_size: int) -> SamplingParams:
    given = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "no_stop_trim": body.no_stop_trim,
    }
    params = SamplingParams(
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop_regex=stop_strings(body.stop_regex),
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    return checked(params, vocab_size, {"max_new_tokens": max_name, "min_new_tokens": "min_tokens"})


def _check_stream_options(body: OpenAIBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream: true", "stream_options")
