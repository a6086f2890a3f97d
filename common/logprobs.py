"""Log-probabilities on their way from the workers to the client."""

import msgspec

MAX_TOP_LOGPROBS = 20
MAX_ASKED_TOKEN_IDS = 1024
MAX_LOGPROBS = 2**21  # of one call, those of the likeliest tokens and of the asked ones included


class InvalidLogprobs(ValueError):
    """A field of a LogprobReq is out of range: `param` names it as SGLang does."""

    def __init__(self, param: str, why: str) -> None:
        super().__init__(f"{param}: {why}")
        self.param = param


class LogprobReq(msgspec.Struct, frozen=True, array_like=True):
    """Which log-probabilities a request wants.

    Of every output token, and of the prompt's tokens behind position `start_len` (-1 or the prompt's length: none of
    them): the token's own, those of the `num_top` likeliest, and of `token_ids`. They are the model's, before penalties,
    bias, masks and temperature. `start_len` is SGLang's logprob_start_len: the token at it has no log-probability, as
    the tokens before it need not be computed.
    """

    start_len: int = -1
    num_top: int = 0
    token_ids: tuple[int, ...] = ()

    def resolved(self, prompt_len: int) -> "LogprobReq":
        """The same, with a `start_len` that is a position."""
        return self if self.start_len >= 0 else msgspec.structs.replace(self, start_len=prompt_len)

    def num_logprobs(self, prompt_len: int, num_outputs: int) -> int:
        """How many come of a prompt and so many outputs, those of the likeliest and of the asked tokens included."""
        num_tokens = prompt_len - self.resolved(prompt_len).start_len + num_outputs
        return num_tokens * (1 + self.num_top + len(self.token_ids))


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of N consecutive tokens of one request, as packed columns.

    `logprobs`: float32 [N], NaN where the model failed. `top_ids` and `top_logprobs`: int32 and float32 [N, num_top],
    falling. `asked_logprobs`: float32 [N, len(token_ids)].
    """

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    asked_logprobs: bytes = b""

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.logprobs) // 4

    @property
    def num_logprobs(self) -> int:
        """Those of the likeliest and of the asked tokens included."""
        return (len(self.logprobs) + len(self.top_logprobs) + len(self.asked_logprobs)) // 4

    def first(self, num_tokens: int) -> "TokenLogprobs":
        """Of the first `num_tokens` of at least so many."""
        if num_tokens == self.num_tokens:
            return self
        return TokenLogprobs(*(column[: len(column) // self.num_tokens * num_tokens] for column in self.columns()))

    def columns(self) -> tuple[bytes, bytes, bytes, bytes]:
        """In the order of the fields."""
        return self.logprobs, self.top_ids, self.top_logprobs, self.asked_logprobs


class LogprobBuffer:
    """Those of one request on their way: pieces are added behind, and taken from the front."""

    def __init__(self) -> None:
        self._columns = tuple(bytearray() for _ in range(4))

    def __len__(self) -> int:
        """Tokens."""
        return len(self._columns[0]) // 4

    def add(self, new: TokenLogprobs) -> None:
        """Append the next tokens."""
        for column, piece in zip(self._columns, new.columns(), strict=True):
            column.extend(piece)

    def take(self, num_tokens: int | None = None) -> TokenLogprobs | None:
        """Remove the first `num_tokens`, or as many as there are; None if there are none."""
        num_here = len(self)
        num_taken = num_here if num_tokens is None else min(num_tokens, num_here)
        if not num_taken:
            return None
        taken = []
        for column in self._columns:
            end = len(column) // num_here * num_taken
            taken.append(bytes(column[:end]))
            del column[:end]
        return TokenLogprobs(*taken)


def check_logprobs(wanted: LogprobReq, prompt_len: int, vocab_size: int) -> None:
    """Raise InvalidLogprobs for what is out of range."""
    if not -1 <= wanted.start_len <= prompt_len:
        raise InvalidLogprobs("logprob_start_len", f"must be from -1 to the prompt's {prompt_len} tokens")
    if not 0 <= wanted.num_top <= MAX_TOP_LOGPROBS:
        raise InvalidLogprobs("top_logprobs_num", f"must be from 0 to {MAX_TOP_LOGPROBS}, not {wanted.num_top}")
    if len(wanted.token_ids) > MAX_ASKED_TOKEN_IDS:
        raise InvalidLogprobs("token_ids_logprob", f"holds at most {MAX_ASKED_TOKEN_IDS} token ids")
    for token_id in wanted.token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidLogprobs("token_ids_logprob", f"{token_id} is not in the vocabulary of {vocab_size}")


def check_num_logprobs(num_logprobs: int) -> None:
    """Raise InvalidLogprobs where that is more than may be in flight for one call."""
    if num_logprobs > MAX_LOGPROBS:
        why = f"up to {num_logprobs} log-probabilities are wanted, and at most {MAX_LOGPROBS} may be"
        raise InvalidLogprobs("logprobs", why)
