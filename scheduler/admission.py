"""The scheduler's own check of a request: a second line behind the edge, which has refused most of these before."""

from array import array

import msgspec

from ..common.messages import TokenizedGenerateReqInput
from ..common.sampling_params import InvalidParam, check_sampling_params
from .req import Req


class Limits(msgspec.Struct, frozen=True):
    """What the workers can do."""

    vocab_size: int
    context_len: int
    max_total_num_tokens: int  # KV slots


class Refused(ValueError):
    """The request can never be served; the message is for the client."""

    status_code = 400


def admit(message: TokenizedGenerateReqInput, limits: Limits) -> Req:
    """Make the request, with `max_new_tokens` clamped to the context and to the KV cache; or raise Refused."""
    token_ids = _token_ids(message.input_ids, limits.vocab_size)
    try:
        check_sampling_params(message.sampling_params, limits.vocab_size)
    except InvalidParam as error:
        raise Refused(str(error)) from error
    num_tokens = len(token_ids)
    if num_tokens >= limits.context_len:
        raise Refused(
            f"The prompt has {num_tokens} tokens and leaves no room for output: the context is {limits.context_len} tokens."
        )
    if num_tokens > limits.max_total_num_tokens:
        raise Refused(f"The prompt has {num_tokens} tokens, and the KV cache holds {limits.max_total_num_tokens}.")
    room = min(
        limits.context_len - num_tokens, limits.max_total_num_tokens - num_tokens + 1
    )  # the last token has no KV
    wanted = message.sampling_params.max_new_tokens
    return Req(message, token_ids, room if wanted is None else min(wanted, room))


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
