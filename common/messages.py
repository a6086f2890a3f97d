"""The protocol: every message between processes, in the order of a token's life.

    start    rank -> scheduler -> tokenizer manager       LoadProgress, WorkerReady, SchedulerReady, DetokenizerReady
    ask      tokenizer manager -> scheduler               TokenizedGenerateReqInput, AbortReq; control: FlushCacheReqInput,
                                                          PauseGenerationReqInput, ContinueGenerationReqInput, ExplainReqInput
    plan     scheduler -> every rank                      ScheduleBatch
    result   rank -> scheduler                            BatchResult (rank 0), StepAck (every rank)
    tokens   scheduler -> detokenizer                     BatchTokenIDOutput
    text     detokenizer -> tokenizer manager             BatchStrOutput
    end      detokenizer -> scheduler                     TextEnded
    status   scheduler -> tokenizer manager               LoadSnapshot, ControlReqOutput, ExplainReqOutput
             detokenizer -> tokenizer manager             DetokenizerHeartbeat

Every link carries a closed tagged union (links.py); a frame that is not of it is dropped by the receiver.
Integer columns travel as packed native int32 (`Int32s`): `pack_int32` and `unpack_int32`.
"""

from array import array
from collections.abc import Iterable

import msgspec

from .finish_reason import FinishReason
from .sampling_params import SamplingParams

Int32s = bytes


def pack_int32(values: Iterable[int]) -> Int32s:
    """Pack integers as native int32; OverflowError outside its range."""
    return array("i", values).tobytes()


def unpack_int32(packed: Int32s) -> list[int]:
    """Inverse of `pack_int32`; ValueError if the length is not a multiple of four."""
    values = array("i")
    values.frombytes(packed)
    return values.tolist()


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A fact (noun), a request (`...Req`, `...ReqInput`) or its answer (`...Output`); never changed once made."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece of a message."""


# ---- start ----------------------------------------------------------------------------------------------------------


class LoadProgress(Message, frozen=True):
    """One rank has loaded `loaded_bytes` of the `total_bytes` of weights that it reads."""

    rank: int
    loaded_bytes: int
    total_bytes: int


class KVGroup(Part, frozen=True):
    """Layers of one kind, whose keys and values live under the same page ids."""

    name: str
    num_layers: int
    page_bytes: int
    num_pages: int


class WorkerReady(Message, frozen=True):
    """A rank has loaded its weights, allocated its KV pages and run a warm-up step."""

    rank: int
    kv_groups: list[KVGroup]
    vocab_size: int
    context_len: int
    max_running_requests: int
    weight_bytes: int


class SchedulerReady(Message, frozen=True):
    """All ranks are ready; `num_kv_pages` is the minimum over the ranks."""

    num_kv_pages: int
    page_size: int
    vocab_size: int
    context_len: int
    max_running_requests: int
    weight_bytes: int


class DetokenizerReady(Message, frozen=True):
    """The detokenizer has loaded its tokenizer."""


# ---- ask ------------------------------------------------------------------------------------------------------------


class TokenizedGenerateReqInput(Message, frozen=True):
    """One request. `rid` is ours and unique; a client's own id is a label, and part of it for the logs alone.

    `input_ids` is never empty. `eos_token_ids` end the request unless `sampling_params.ignore_eos`.
    `arrival` is the manager's monotonic clock in seconds (one clock for all processes of a host).
    `frontend` names the HTTP or Engine process that asked: replies go there.
    `waiting_timeout` and `timeout` are seconds from arrival; they can only lower the server's own limits.
    """

    rid: str
    frontend: str
    arrival: float
    input_ids: Int32s
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    stream: bool = False
    traceparent: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    routing_key: str | None = None
    lora_id: str | None = None
    waiting_timeout: float | None = None
    timeout: float | None = None


class AbortReq(Message, frozen=True):
    """End these requests, exactly these ids; unknown ids are ignored (their end is already on its way)."""

    rids: list[str]
    message: str = "The request was aborted."
    status_code: int = 499


class FlushCacheReqInput(Message, frozen=True):
    """Empty the radix cache; refused while a request holds KV pages, or waits without the server being paused."""

    request_id: str
    frontend: str


PAUSE_MODES = ("abort", "retract", "in_place")


class PauseGenerationReqInput(Message, frozen=True):
    """Plan no step until ContinueGenerationReqInput. Answered when no step is in flight.

    `mode` is one of PAUSE_MODES: `retract` gives the pages of running requests back, `in_place` keeps them; for `abort`
    the tokenizer manager sends the aborts, and the scheduler does as for `in_place`. New requests wait meanwhile.
    """

    request_id: str
    frontend: str
    mode: str = "in_place"


class ContinueGenerationReqInput(Message, frozen=True):
    """Go on after a pause."""

    request_id: str
    frontend: str


class ExplainReqInput(Message, frozen=True):
    """What became of this request, and why? Answered by ExplainReqOutput."""

    request_id: str
    frontend: str
    rid: str


# ---- plan -----------------------------------------------------------------------------------------------------------


class NewReq(Part, frozen=True):
    """Full data for a request that gets a row: all token ids known so far (prompt, then outputs if it resumes)."""

    row: int
    generation: int  # of the row; raised each time the row is given out
    rid: str
    input_ids: Int32s
    prompt_len: int  # the prompt/output boundary in input_ids
    sampling_params: SamplingParams
    end_token_ids: tuple[int, ...]  # EOS and stop ids: masked until min_new_tokens


class PageColumns(Part, frozen=True):
    """New pages of one KV group, in order of each row's page table: `page_ids` holds `counts[i]` ids for `rows[i]`."""

    rows: Int32s
    counts: Int32s
    page_ids: Int32s


class ScheduleBatch(Message, frozen=True):
    """One step: the only thing that changes a worker's state, applied top to bottom.

    Prefill row i computes positions [extend_starts[i], extend_ends[i]) of its known tokens, on top of cached pages;
    where `extend_ends[i]` is the number of known tokens the row also samples its next token (0 tokens otherwise).
    A decode row feeds its last sampled token, which only the worker is sure to know, at position `row_len - 1`.
    A batch may have no rows to compute: then the worker only applies the changes and acknowledges.
    """

    step: int
    freed_rows: Int32s  # rows whose request ended or was retracted
    new_reqs: list[NewReq]
    new_pages: list[PageColumns]  # one per KV group
    extend_rows: Int32s
    extend_starts: Int32s
    extend_ends: Int32s
    decode_rows: Int32s
    decode_width: int = 1  # tokens reserved for each decode row in this step


# ---- result ---------------------------------------------------------------------------------------------------------

ROW_GRAMMAR_ENDED = 1
ROW_ERROR = 2


class BatchResult(Message, frozen=True):
    """Rank 0's result of one step; row order is extend rows, then decode rows.

    `token_ids` is flat: `num_tokens[i]` ids for row i (0 for a middle chunk or a failed row).
    `row_lens` is the number of tokens the row knows after the step (prompt and outputs).
    `flags` are ROW_GRAMMAR_ENDED | ROW_ERROR; `errors` explains the rows that failed.
    """

    step: int
    rows: Int32s
    generations: Int32s
    num_tokens: Int32s
    token_ids: Int32s
    row_lens: Int32s
    flags: Int32s
    errors: dict[int, str]  # row -> message
    step_seconds: float


class StepAck(Message, frozen=True):
    """A rank has finished a step; feeds the watchdog and never gates a step."""

    rank: int
    step: int
    dropped_frames_total: int = 0


# ---- tokens ---------------------------------------------------------------------------------------------------------


class StreamStart(Part, frozen=True):
    """What the detokenizer needs of a request, sent once, ahead of its first tokens or its refusal."""

    rid: str
    frontend: str
    stream: bool  # text as it comes; otherwise one output at the end
    prompt_len: int
    context_ids: Int32s  # the last few prompt tokens: the left context of incremental decoding
    min_new_tokens: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    no_stop_trim: bool
    stop_regex: tuple[str, ...] = ()


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


# ---- status ---------------------------------------------------------------------------------------------------------


class LoadSnapshot(Message, frozen=True):
    """The scheduler's gauges now, its counters since boot, and observations since the last snapshot. The heartbeat."""

    steps: int
    num_running_reqs: int
    num_queue_reqs: int
    num_used_tokens: int  # KV slots held by running requests
    num_cached_tokens: int  # KV slots of the radix cache that could be evicted
    max_total_num_tokens: int
    new_token_ratio: float
    cache_query_tokens_total: int
    cache_hit_tokens_total: int
    retractions_total: int
    dropped_frames_total: int
    step_seconds: list[float]
    queue_seconds: list[float]
    num_queue_tokens: int = 0  # known tokens of the waiting requests
    started_reqs_total: int = 0  # requests that left the queue for their first step: the queue's drain
    started_tokens_total: int = 0  # and their prompt tokens
    preemptions_total: int = 0
    backfills_total: int = 0
    broken_invariants_total: int = 0
    chunk_tokens: int = 0  # prompt tokens that a step may compute now
    is_paused: bool = False


class DetokenizerHeartbeat(Message, frozen=True):
    """The detokenizer goes on; sent every second, whatever else it does."""

    dropped_frames_total: int


class ControlReqOutput(Message, frozen=True):
    """Whether a control request (flush, pause, continue) was done, and why not."""

    request_id: str
    success: bool
    message: str


class ExplainedEvent(Part, frozen=True):
    """One thing that happened to a request: `seconds` after its arrival, when `step` was the next to be planned.

    `what` is queued, refused, blocked, waited, backfilled, admitted, chunk, first_token, retracted, preempted, text_ended,
    ended or omitted; `numbers` are the budgets, lengths and rules that decided it.
    """

    seconds: float
    step: int
    what: str
    numbers: dict[str, int | float | str]


class ExplainReqOutput(Message, frozen=True):
    """The life of a request in order; `status` is None, and `events` empty, where the scheduler knows no such rid."""

    request_id: str
    rid: str
    status: str | None
    events: list[ExplainedEvent]
