"""Bodies of the OpenAI routes: what is decoded, what is refused, and how it becomes sampling parameters.

Fields that we do not know are ignored, as OpenAI does. Fields that we know and do not support yet are refused, so
that nobody gets an answer to another question than theirs.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...common.logprobs import LogprobReq
from ...common.sampling_params import SamplingParams
from ..api_error import bad_request
from ..grammar.grammar_protocol import MoreGrammarFields
from ..json_body import CacheSalt, Int32, Int64, Label, Temperature, check_unsupported
from .logprob_fields import completion_logprobs
from .sampling_fields import SamplingBase, check_best_of, logit_bias, stop_strings

MAX_PROMPTS = 128
COMPLETION_MAX_TOKENS = 16
SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "lora_path": (),
    "guided_whitespace_pattern": (),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "return_hidden_states": (False,),
    "session_params": (),
    "custom_params": (),
    "custom_logit_processor": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
NEUTRAL_COMPLETION = {**NEUTRAL, "suffix": ("",), "prompt_embeds": ()}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What else a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every chunk that of all so far


class OpenAIBody(MoreGrammarFields, kw_only=True):
    """What chat and plain completions have in common, SGLang's and vLLM's extensions included."""

    model: str | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name of no_stop_trim
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Label | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    n: Int64 | None = None
    best_of: Int64 | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    lora_path: Any = None
    allowed_token_ids: Any = None
    bad_words: list[str] | None = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    custom_params: Any = None
    custom_logit_processor: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    guided_whitespace_pattern: Any = None
    user: Any = None  # OpenAI's, without effect here, as are those below
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prediction: Any = None
    verbosity: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether the chunks ahead of it have one too."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(OpenAIBody, kw_only=True):
    """POST /v1/completions; several prompts give as many choices."""

    prompt: str | list[str | int | list[int]]
    logprobs: Int64 | None = None
    echo: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None

    def check(self) -> None:
        """APIError for what types alone do not catch."""
        check_unsupported(self, NEUTRAL_COMPLETION)
        check_stream_options(self)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        return split_prompts(self.prompt, "prompt", MAX_PROMPTS)

    def wanted_logprobs(self) -> LogprobReq | None:
        """What `logprobs` and `echo` ask for together."""
        return completion_logprobs(self.logprobs, echo=bool(self.echo))

    def sampling_params(self, base: SamplingBase) -> SamplingParams:
        """OpenAI's default is 16 tokens."""
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return sampling_params_of(self, max_tokens, "max_tokens", base, may_be_empty=bool(self.echo))


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


def sampling_params_of(
    body: OpenAIBody, max_tokens: int | None, max_name: str, base: SamplingBase, *, may_be_empty: bool = False
) -> SamplingParams:
    """The fields of a body as sampling parameters; APIError names the field that is wrong."""
    check_best_of(body.best_of, body.n)
    given = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": body.min_tokens,
        "stop": stop_strings(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "stop_regex": stop_strings(body.stop_regex),
        "logit_bias": logit_bias(body.logit_bias),
        "bad_words": base.bad_words(body.bad_words),
        **{name: getattr(body, name) for name in SAME_NAMES},
    }
    if body.no_stop_trim is None:
        given["no_stop_trim"] = body.include_stop_str_in_output
    names = {"max_new_tokens": max_name, "min_new_tokens": "min_tokens"}
    return base.params(given, names, may_be_empty=may_be_empty)


def check_stream_options(body: OpenAIBody) -> None:
    """APIError where they say something of no stream."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream: true", "stream_options")
