"""The scheduler's own check of a request: a second line behind the edge, which has refused most of these before."""

import math
from array import array

from ..common.logprobs import InvalidLogprobs, check_logprobs, check_num_logprobs
from ..common.messages import POOLINGS, TokenizedGenerateReqInput
from ..common.sampling_params import MAX_STOP_TOKEN_IDS, InvalidParam, check_sampling_params
from .req import Req
from .scheduler_config import SchedulerConfig
from .waiting_queue import WaitingQueue

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_LENS = {  # characters; far above what the edge lets a client send
    "cache_salt": 1024,
    "routing_key": 1024,
    "lora_id": 1024,
    "traceparent": 1024,
    "grammar": 4 * 2**20,
}

TOO_LONG = "ContextLengthExceeded"


class Refused(ValueError):
    """The request is not taken; the message is for the client."""

    def __init__(self, message: str, status_code: int = 400, err_type: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.err_type = err_type


def admit(message: TokenizedGenerateReqInput, config: SchedulerConfig) -> Req:
    """Make the request, with `max_new_tokens` clamped to the context and to the KV cache; or raise Refused."""
    token_ids = _token_ids(message.input_ids, config.vocab_size)
    try:
        check_sampling_params(message.sampling_params, config.vocab_size)
    except InvalidParam as error:
        raise Refused(str(error)) from error
    _check_end_tokens(message.eos_token_ids, config.vocab_size)
    _check_lens(message)
    _check_times(message)
    _check_pooling(message)
    max_new_tokens = _max_new_tokens(message, len(token_ids), config)
    _check_logprobs(message, len(token_ids), max_new_tokens, config)
    return Req(message, token_ids, max_new_tokens, _priority(message, config))


def check_queue(reqs: list[Req], queue: WaitingQueue, num_grammar_reqs: int, config: SchedulerConfig) -> None:
    """Refuse with 429 what would make the queue longer than its bounds. An empty queue takes any request.

    `reqs` come together, the first of them ahead of the others that share its prompt. `num_grammar_reqs` wait for their grammars, ahead of the queue, and count as if they were in it.
    """
    num_tokens = queue.num_tokens + reqs[0].num_waiting_tokens
    num_reqs = len(queue) + num_grammar_reqs
    if num_reqs and num_reqs + len(reqs) > config.max_queued_requests:
        raise Refused(f"The queue is full: {num_reqs} requests wait.", 429)
    if len(queue) and num_tokens > config.queued_tokens_limit:
        limit = config.queued_tokens_limit
        raise Refused(f"The queue is full: {queue.num_tokens} prompt tokens wait, and at most {limit} may.", 429)


def _max_new_tokens(message: TokenizedGenerateReqInput, num_tokens: int, config: SchedulerConfig) -> int:
    """Outputs that the request may have: the context's room and the KV cache's. The last output needs no KV.

    One where none is wanted: it is dropped when it comes.
    """
    context_len = config.context_len
    num_slots = config.num_kv_tokens - config.max_steps_in_flight * (config.decode_width - 1)
    if num_tokens >= context_len:
        raise Refused(
            f"The prompt has {num_tokens} tokens and leaves no room for output: the context is {context_len} tokens.",
            err_type=TOO_LONG,
        )
    if num_tokens > num_slots:
        told = f"The prompt has {num_tokens} tokens, and the KV cache holds {num_slots}."
        raise Refused(told, err_type=TOO_LONG)
    room = min(context_len - num_tokens, num_slots - num_tokens + 1)
    wanted = message.sampling_params.max_new_tokens
    return room if wanted is None else min(max(wanted, 1), room)


def _check_logprobs(
    message: TokenizedGenerateReqInput, prompt_len: int, max_new_tokens: int, config: SchedulerConfig
) -> None:
    if message.logprobs is None:
        return
    try:
        check_logprobs(message.logprobs, prompt_len, config.vocab_size)
        check_num_logprobs(message.logprobs.num_logprobs(prompt_len, max_new_tokens))
    except InvalidLogprobs as error:
        raise Refused(str(error)) from error


def _check_pooling(message: TokenizedGenerateReqInput) -> None:
    if message.pooling is None:
        return
    if message.pooling not in POOLINGS:
        raise Refused(f"pooling must be one of {', '.join(POOLINGS)}.")
    if (
        message.sampling_params.max_new_tokens != 0
        or message.sampling_params.n != 1
        or message.grammar
        or message.logprobs
    ):
        raise Refused("A request for a vector has no outputs: no grammar, no log-probabilities, and n is 1.")


def _check_end_tokens(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if len(token_ids) > MAX_STOP_TOKEN_IDS or not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise Refused(f"eos_token_ids must be at most {MAX_STOP_TOKEN_IDS} tokens of the vocabulary of {vocab_size}.")


def _check_lens(message: TokenizedGenerateReqInput) -> None:
    for name, max_len in MAX_LENS.items():
        text = getattr(message, name)
        if text is not None and len(text) > max_len:
            raise Refused(f"{name} has {len(text)} characters, and at most {max_len} are allowed.")


def _priority(message: TokenizedGenerateReqInput, config: SchedulerConfig) -> int:
    """Larger is more urgent, whatever the flag says of the client's numbers; 0 where there is none."""
    priority = message.priority or 0
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise Refused(f"priority must fit in 32 bits, not {priority}.")
    if not config.enable_priority_scheduling:
        return 0
    return -priority if config.schedule_low_priority_values_first else priority


def _check_times(message: TokenizedGenerateReqInput) -> None:
    for name in ("arrival", "waiting_timeout", "timeout"):
        seconds = getattr(message, name)
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise Refused(f"{name} must be a finite number of seconds, not {seconds}.")


def _token_ids(input_ids: bytes, vocab_size: int) -> "array[int]":
    token_ids = array("i")
    if len(input_ids) % token_ids.itemsize:
        raise Refused("input_ids is not a whole number of tokens.")
    token_ids.frombytes(input_ids)
    if not token_ids:
        raise Refused("The prompt is empty.")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise Refused(f"input_ids: {token_id} is not in the vocabulary of {vocab_size}.")
    return token_ids
