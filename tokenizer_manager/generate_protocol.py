"""Bodies of SGLang's own routes."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..common.sampling_params import SamplingParams
from .api_error import bad_request
from .call import check_routing_key
from .json_body import CacheSalt, Int32, Int64, Label, check_unsupported
from .openai_protocol import checked, split_prompts, stop_strings

MAX_BATCH = 4096
MAX_NEW_TOKENS = 128
MAX_BATCH_STOP_REGEXES = 64  # different ones, each compiled while the server waits
NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "beam_width": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "spaces_between_special_tokens": (True,),
    "custom_params": (),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "return_logprob": (False,),
    "return_hidden_states": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
}


class GenerateSamplingParams(msgspec.Struct, kw_only=True):
    """SGLang's sampling parameters, by its names and defaults."""

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
    spaces_between_special_tokens: Any = None
    no_stop_trim: bool = False
    n: Any = None
    beam_width: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None

    def to_params(self, vocab_size: int, at: str) -> SamplingParams:
        """The checked params; `at` is where they stand in the body."""
        check_unsupported(self, NEUTRAL_SAMPLING, f"{at}.")
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed if self.sampling_seed is None else self.sampling_seed,
            stop=stop_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=stop_strings(self.stop_regex),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim,
        )
        return checked(params, vocab_size, {}, at)


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /generate: one of `text` and `input_ids`, single or batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSamplingParams | list[GenerateSamplingParams] | None = None
    rid: Label | list[Label] | None = None
    stream: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    routing_key: str | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    return_logprob: Any = None
    return_hidden_states: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None

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

    def params(self, num_prompts: int, vocab_size: int) -> list[SamplingParams]:
        """Sampling parameters of each prompt."""
        given = self.sampling_params
        if not isinstance(given, list):
            return [(given or GenerateSamplingParams()).to_params(vocab_size, "sampling_params")] * num_prompts
        if len(given) != num_prompts:
            message = f"sampling_params has {len(given)} items for {num_prompts} prompts"
            raise bad_request(message, "sampling_params")
        regexes = {regex for item in given for regex in stop_strings(item.stop_regex)}
        if len(regexes) > MAX_BATCH_STOP_REGEXES:
            message = f"a batch may have at most {MAX_BATCH_STOP_REGEXES} different stop_regex, not {len(regexes)}"
            raise bad_request(message, "sampling_params")
        return [item.to_params(vocab_size, f"sampling_params[{index}]") for index, item in enumerate(given)]

    def labels(self, num_prompts: int) -> list[str | None]:
        """The client's id of each prompt; one id for a batch is numbered."""
        if self.rid is None:
            return [None] * num_prompts
        if isinstance(self.rid, str):
            return [self.rid] if self.is_single else [f"{self.rid}-{index}" for index in range(num_prompts)]
        if len(self.rid) != num_prompts:
            raise bad_request(f"rid has {len(self.rid)} items for {num_prompts} prompts", "rid")
        return list(self.rid)


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request: one request, or all of them."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """POST /pause_generation; SGLang's default."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
