"""Tokens on their way to text, and text on its way to the client."""

from .finish_reason import FinishReason
from .logprobs import TokenLogprobs
from .messages import Int32s, Message, Part

NUM_CONTEXT_TOKENS = 8  # of a prompt's end: the left context of incremental decoding

# ---- tokens ---------------------------------------------------------------------------------------------------------


class StreamStart(Part, frozen=True):
    """What the detokenizer needs of a request, sent once, ahead of its first tokens or its refusal."""

    rid: str
    frontend: str
    stream: bool  # text as it comes; otherwise one output at the end
    prompt_len: int
    context_ids: Int32s  # the last NUM_CONTEXT_TOKENS of the prompt
    min_new_tokens: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    no_stop_trim: bool
    stop_regex: tuple[str, ...] = ()
    spaces_between_special_tokens: bool = True


class RequestStats(Part, frozen=True):
    """What usage, metrics and logs say of a request that ended."""

    prompt_tokens: int
    cached_tokens: int
    num_retractions: int


class RequestEnd(Part, frozen=True):
    """The scheduler's proposal: the request ends after `num_tokens` outputs. A text end may come first."""

    rid: str
    finish_reason: FinishReason
    num_tokens: int
    stats: RequestStats


class BatchTokenIDOutput(Message, frozen=True):
    """Tokens of one step: `num_tokens[i]` ids for `rids[i]`, and the requests that start and end with it.

    Read in order: starts, tokens, ends. `cached_tokens[i]` and `generations[i]` (retractions so far) of `rids[i]`.
    """

    starts: list[StreamStart]
    rids: list[str]
    generations: Int32s
    cached_tokens: Int32s
    num_tokens: Int32s
    token_ids: Int32s
    ends: list[RequestEnd]
    logprobs: dict[str, TokenLogprobs] = {}  # rid -> of its tokens in this message
    prompt_logprobs: dict[str, TokenLogprobs] = {}  # rid -> of all prompt tokens that were asked for, once
    embeddings: dict[str, bytes] = {}  # rid -> float32


# ---- text -----------------------------------------------------------------------------------------------------------


class StrEnd(Part, frozen=True):
    """The one final answer of a request. `completion_tokens` counts what the client gets, the ending token included."""

    finish_reason: FinishReason
    completion_tokens: int
    stats: RequestStats


class StrOutput(Part, frozen=True):
    """New text and token ids of one request; `end` is set exactly once, in its last output."""

    rid: str
    text: str
    token_ids: Int32s
    end: StrEnd | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    embedding: bytes = b""


class BatchStrOutput(Message, frozen=True):
    """Text of one step, for one frontend."""

    outputs: list[StrOutput]


class TextEnded(Message, frozen=True):
    """A stop string or regex ended this request after `num_tokens` outputs; idempotent, accepted in every state.

    `generation` is that of the tokens which brought the end (see BatchTokenIDOutput). A retracted request resumes with
    the same tokens, so the number of them says all; the generation is for logs and recordings.
    """

    rid: str
    generation: int
    num_tokens: int
