"""Sampling parameters: one struct, checked at the HTTP edge and again at the scheduler's admission."""

import math
from collections.abc import Iterable

import msgspec

MAX_STOP_STRINGS = 32
MAX_STOP_LEN = 256  # characters: each costs the detokenizer memory
MAX_STOP_REGEXES = 4
MAX_STOP_REGEX_LEN = 128  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1  # of tokens
MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # of presence and frequency, either side of 0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 32
MAX_N = 16
GREEDY_TEMPERATURE = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """What one request asks of the sampler; SGLang's names and defaults.

    `max_new_tokens` None means "until the context is full", 0 that the prompt alone is computed. `top_k` -1 (or 0)
    keeps the whole vocabulary. A `temperature` under 1e-6 is greedy. `seed` is never None behind the tokenizer manager:
    it draws one.
    `bad_words` are sequences of token ids that must not come. `n` answers are wanted of one prompt.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    spaces_between_special_tokens: bool = True
    n: int = 1

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
    _check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    if not -1 <= params.top_k <= MAX_COUNT:
        raise InvalidParam("top_k", f"top_k must be -1 (all tokens) or from 1 to {MAX_COUNT}, not {params.top_k}")
    if params.max_new_tokens is not None and params.max_new_tokens < 0:
        raise InvalidParam("max_new_tokens", f"max_new_tokens must be at least 0, not {params.max_new_tokens}")
    if not 0 <= params.min_new_tokens <= MAX_COUNT:
        raise InvalidParam(
            "min_new_tokens", f"min_new_tokens must be from 0 to {MAX_COUNT}, not {params.min_new_tokens}"
        )
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
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_logit_bias(params.logit_bias, vocab_size)
    _check_bad_words(params.bad_words, vocab_size)
    if not 1 <= params.n <= MAX_N:
        raise InvalidParam("n", f"n must be from 1 to {MAX_N}, not {params.n}")


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    if len(logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidParam("logit_bias", f"logit_bias holds at most {MAX_BIASED_TOKENS} tokens, not {len(logit_bias)}")
    _check_ids("logit_bias", logit_bias, vocab_size)
    for bias in logit_bias.values():
        _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _check_bad_words(bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise InvalidParam("bad_words", f"at most {MAX_BAD_WORDS} bad_words are allowed, not {len(bad_words)}")
    for ids in bad_words:
        if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidParam("bad_words", f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
        _check_ids("bad_words", ids, vocab_size)


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidParam(name, f"{name}: {token_id} is not in the vocabulary of {vocab_size}")


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidParam(name, f"{name} must be a finite number in {bracket}{low:g}, {high:g}], not {value!r}")
