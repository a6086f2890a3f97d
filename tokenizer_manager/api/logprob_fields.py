"""The fields by which the APIs ask for log-probabilities: checked, and made into one LogprobReq."""

from collections.abc import Iterable
from typing import NamedTuple

from ...common.logprobs import MAX_TOP_LOGPROBS, InvalidLogprobs, LogprobReq, check_logprobs, check_num_logprobs
from ...common.sampling_params import SamplingParams
from ..api_error import bad_request

MAX_COMPLETION_LOGPROBS = 5
WHOLE_PROMPT = 0


class Wanted(NamedTuple):
    """What one request of a call wants, and how much there may be of it."""

    logprobs: LogprobReq
    prompt_len: int
    params: SamplingParams


def chat_logprobs(logprobs: bool | None, top_logprobs: int | None) -> LogprobReq | None:
    """OpenAI's chat: `logprobs` asks, `top_logprobs` says how many of the likeliest tokens; APIError names the field."""
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        message = f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {top_logprobs}"
        raise bad_request(message, "top_logprobs")
    if top_logprobs and not logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return LogprobReq(num_top=top_logprobs or 0) if logprobs else None


def completion_logprobs(logprobs: int | None, *, echo: bool) -> LogprobReq | None:
    """OpenAI's text completions: `logprobs` is how many of the likeliest tokens; with `echo` the prompt's too."""
    if logprobs is None:
        return None
    if not 0 <= logprobs <= MAX_COMPLETION_LOGPROBS:
        raise bad_request(f"logprobs must be from 0 to {MAX_COMPLETION_LOGPROBS}, not {logprobs}", "logprobs")
    return LogprobReq(WHOLE_PROMPT if echo else -1, logprobs)


def check_wanted(wanted: Iterable[Wanted], vocab_size: int, context_len: int) -> None:
    """APIError for what is out of range, or too much for one call."""
    total = 0
    try:
        for logprobs, prompt_len, params in wanted:
            check_logprobs(logprobs, prompt_len, vocab_size)
            room, limit = context_len - prompt_len, params.max_new_tokens
            num_outputs = room if limit is None else min(room, limit)
            total += params.n * logprobs.num_logprobs(prompt_len, num_outputs)
            check_num_logprobs(total)
    except InvalidLogprobs as error:
        raise bad_request(str(error), error.param) from None
