"""Bodies of SGLang's own routes."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...common.logprobs import LogprobReq
from ...common.sampling_params import SamplingParams
from ..api_error import bad_request
from ..call import check_routing_key
from ..grammar.grammar_messages import Grammar
from ..grammar.grammar_protocol import GrammarFields, grammar_of
from ..json_body import CacheSalt, Int32, Int64, Label, check_unsupported
from .openai_protocol import split_prompts
from .sampling_fields import SamplingBase, logit_bias, stop_strings

MAX_BATCH = 4096
MAX_NEW_TOKENS = 128
SAME_NAMES = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
)
NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "stream_interval": (1,),
    "custom_params": (),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "return_hidden_states": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "return_routed_experts": (False,),
    "data_parallel_rank": (0,),
}


class GenerateSamplingParams(GrammarFields, kw_only=True, forbid_unknown_fields=True):
    """SGLang's sampling parameters, by its names and defaults; others are refused, as SGLang does."""

    max_new_tokens: Int64 | None = MAX_NEW_TOKENS
    min_new_tokens: Int64 = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = -1
    min_p: float = 0.0
    sampling_seed: Int64 | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: Int64 = 1
    beam_width: Any = None
    stream_interval: Any = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    custom_params: Any = None

    def to_params(self, base: SamplingBase, at: str) -> SamplingParams:
        """The checked params; `at` is where they stand in the body. The model's own defaults are not used here."""
        check_unsupported(self, NEUTRAL_SAMPLING, f"{at}.")
        params = SamplingParams(
            seed=self.seed if self.sampling_seed is None else self.sampling_seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=stop_strings(self.stop_regex),
            logit_bias=logit_bias(self.logit_bias, at) or {},
            bad_words=base.bad_words(self.bad_words, at) or (),
            **{name: getattr(self, name) for name in SAME_NAMES},
        )
        return base.checked(params, {}, at, may_be_empty=True)


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate: one of `text` and `input_ids`, single or batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSamplingParams | list[GenerateSamplingParams] | None = None
    rid: Label | list[Label] | None = None
    stream: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    extra_key: CacheSalt | None = None
    routing_key: str | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int64 | list[Int64] | None = None
    top_logprobs_num: Int64 | list[Int64] | None = None
    token_ids_logprob: list[Int64 | list[Int64]] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_routed_experts: Any = None
    data_parallel_rank: Any = None

    @property
    def is_single(self) -> bool:
        """Whether one object is answered, not a list."""
        if self.text is not None:
            return isinstance(self.text, str)
        return bool(self.input_ids) and isinstance(self.input_ids[0], int)  # type: ignore[index]

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        check_unsupported(self, NEUTRAL)
        check_routing_key(self.routing_key, "routing_key")
        if self.text is None and self.input_ids is None:
            raise bad_request("text or input_ids is required", "text", "missing_field")
        if self.text is not None and self.input_ids is not None:
            raise bad_request("give text or input_ids, not both", "input_ids")
        if self.text is not None:
            return split_prompts(self.text, "text", MAX_BATCH)
        return split_prompts(self.input_ids, "input_ids", MAX_BATCH)

    def params(self, num_prompts: int, base: SamplingBase) -> list[SamplingParams]:
        """Sampling parameters of each prompt."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [(given or GenerateSamplingParams()).to_params(base, "sampling_params")] * num_prompts
        if len(given) != num_prompts:
            message = f"sampling_params has {len(given)} items for {num_prompts} prompts"
            raise bad_request(message, "sampling_params")
        return [item.to_params(base, f"sampling_params[{index}]") for index, item in enumerate(given)]

    def grammars(self, num_prompts: int) -> list[Grammar | None]:
        """The grammar of each prompt."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [grammar_of(given or GenerateSamplingParams(), "sampling_params.")] * num_prompts
        return [grammar_of(item, f"sampling_params[{index}].") for index, item in enumerate(given)]

    def logprobs(self, num_prompts: int) -> list[LogprobReq | None]:
        """What each prompt wants of log-probabilities."""
        wants = self._of_each(self.return_logprob, "return_logprob", num_prompts)
        starts = self._of_each(self.logprob_start_len, "logprob_start_len", num_prompts)
        tops = self._of_each(self.top_logprobs_num, "top_logprobs_num", num_prompts)
        ids = self.token_ids_logprob
        if ids is None or not ids or isinstance(ids[0], int):
            asked = [split_ids(ids)] * num_prompts
        else:
            asked = [split_ids(each) for each in self._of_each(ids, "token_ids_logprob", num_prompts)]
        found = [
            LogprobReq(-1 if start is None else start, top or 0, token_ids)
            for start, top, token_ids in zip(starts, tops, asked, strict=True)
        ]
        return [each if is_wanted else None for each, is_wanted in zip(found, wants, strict=True)]

    def _of_each(self, given: Any, name: str, num_prompts: int) -> list[Any]:
        """One value for each prompt."""
        if not isinstance(given, list):
            return [given] * num_prompts
        if len(given) != num_prompts:
            raise bad_request(f"{name} has {len(given)} items for {num_prompts} prompts", name)
        return given

    def labels(self, num_prompts: int) -> list[str | None]:
        """The client's id of each prompt; one id for a batch is numbered."""
        if self.rid is None:
            return [None] * num_prompts
        if isinstance(self.rid, str):
            return [self.rid] if self.is_single else [f"{self.rid}-{index}" for index in range(num_prompts)]
        if len(self.rid) != num_prompts:
            raise bad_request(f"rid has {len(self.rid)} items for {num_prompts} prompts", "rid")
        return list(self.rid)


def split_ids(given: Any) -> tuple[int, ...]:
    """The token ids of one prompt; APIError for a mixture."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(token_id, int) for token_id in given):
        raise bad_request("token_ids_logprob mixes token ids and lists", "token_ids_logprob", "invalid_type")
    return tuple(given)


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request: one request, or all of them."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """POST /pause_generation; SGLang's default."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
