"""Log-probabilities on their way from the workers to the client."""

import msgspec

MAX_TOP_LOGPROBS = 20
MAX_ASKED_TOKEN_IDS = 1024


class LogprobReq(msgspec.Struct, frozen=True, array_like=True):
    """Which log-probabilities a request wants.

    Of every output token, and of the prompt's tokens from position `start_len` on (the prompt's length: none of them):
    the token's own, those of the `num_top` likeliest, and of `token_ids`. They are the model's, before penalties, bias,
    masks and temperature.
    """

    start_len: int
    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of N consecutive tokens of one request, as packed columns.

    `logprobs`: float32 [N], NaN where there is none (the first token of a prompt). `top_ids` and `top_logprobs`: int32
    and float32 [N, num_top], falling. `asked_logprobs`: float32 [N, len(token_ids)].
    """

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    asked_logprobs: bytes = b""
