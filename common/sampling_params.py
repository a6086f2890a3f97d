"""Sampling parameters: one struct, checked at the HTTP edge and again at the scheduler's admission."""

import math

import msgspec

MAX_STOP_STRINGS = 32
MAX_STOP_LEN = 256  # characters: each costs the detokenizer memory
MAX_STOP_REGEXES = 4
MAX_STOP_REGEX_LEN = 128  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**63 - 1
GREEDY_TEMPERATURE = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """What one request asks of the sampler; SGLang's names and defaults.

    `max_new_tokens` None means "until the context is full". `top_k` -1 (or 0) keeps the whole vocabulary.
    A `temperature` under 1e-6 is greedy. `seed` is never None behind the tokenizer manager: it draws one.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stop_regex: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken and no noise is drawn."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


class InvalidParam(ValueError):
    """A sampling parameter is out of range: `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParam naming the first field that is out of range or not finite."""
    _check_range("temperature", params.temperature, 0.0, 2.0**20)
    _check_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", params.min_p, 0.0, 1.0)
    if params.top_k < -1:
        raise InvalidParam("top_k", f"top_k must be -1 (all tokens) or at least 1, not {params.top_k}")
    if params.max_new_tokens is not None and params.max_new_tokens < 1:
        raise InvalidParam("max_new_tokens", f"max_new_tokens must be at least 1, not {params.max_new_tokens}")
    if params.min_new_tokens < 0:
        raise InvalidParam("min_new_tokens", f"min_new_tokens must be at least 0, not {params.min_new_tokens}")
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise InvalidParam(
            "min_new_tokens",
            f"min_new_tokens ({params.min_new_tokens}) must not exceed max_new_tokens ({params.max_new_tokens})",
        )
    if params.seed is not None and not -MAX_SEED - 1 <= params.seed <= MAX_SEED:
        raise InvalidParam("seed", "seed must fit in 64 bits")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParam("stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(params.stop)}")
    if any(not text for text in params.stop):
        raise InvalidParam("stop", "a stop string must not be empty")
    if any(len(text) > MAX_STOP_LEN for text in params.stop):
        raise InvalidParam("stop", f"a stop string must have at most {MAX_STOP_LEN} characters")
    if len(params.stop_regex) > MAX_STOP_REGEXES:
        raise InvalidParam("stop_regex", f"at most {MAX_STOP_REGEXES} stop_regex are allowed")
    if any(not 0 < len(text) <= MAX_STOP_REGEX_LEN for text in params.stop_regex):
        raise InvalidParam("stop_regex", f"a stop_regex must have 1 to {MAX_STOP_REGEX_LEN} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidParam("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidParam("stop_token_ids", f"stop_token_ids: {token_id} is not in the vocabulary of {vocab_size}")


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidParam(name, f"{name} must be a finite number in {bracket}{low:g}, {high:g}], not {value!r}")
