"""The protocol: every message between processes, in the order of a token's life.

    start    rank -> scheduler -> tokenizer manager       LoadProgress, WorkerReady, SchedulerReady, DetokenizerReady
    ask      tokenizer manager -> scheduler               TokenizedGenerateReqInput, AbortReq, FlushCacheReqInput
    plan     scheduler -> every rank                      ScheduleBatch
    result   rank -> scheduler                            BatchResult (rank 0), StepAck (every rank)
    tokens   scheduler -> detokenizer                     BatchTokenIDOutput
    text     detokenizer -> tokenizer manager             BatchStrOutput
    end      detokenizer -> scheduler                     TextEnded
    status   scheduler -> tokenizer manager               LoadSnapshot, FlushCacheReqOutput
             detokenizer -> tokenizer manager             DetokenizerHeartbeat

Every link carries a closed tagged union (the last section); a frame that is not of it is dropped by the receiver.
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


class AbortReq(Message, frozen=True):
    """End these requests, exactly these ids; unknown ids are ignored (their end is already on its way)."""

    rids: list[str]
    message: str = "The request was aborted."
    status_code: int = 499


class FlushCacheReqInput(Message, frozen=True):
    """Empty the radix cache; refused while anything runs or waits."""

    request_id: str
    frontend: str


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
    """A stop string ended this request after `num_tokens` outputs; idempotent, accepted in every state.

    `generation` is that of the tokens which brought the end (see BatchTokenIDOutput).
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


class DetokenizerHeartbeat(Message, frozen=True):
    """The detokenizer goes on; sent every second, whatever else it does."""

    dropped_frames_total: int


class FlushCacheReqOutput(Message, frozen=True):
    """Whether the cache was emptied, and why not."""

    request_id: str
    success: bool
    message: str


# ---- links ----------------------------------------------------------------------------------------------------------

ToScheduler = TokenizedGenerateReqInput | AbortReq | FlushCacheReqInput
FromRank = LoadProgress | WorkerReady | BatchResult | StepAck
FromScheduler = LoadProgress | SchedulerReady | LoadSnapshot | FlushCacheReqOutput
FromDetokenizer = DetokenizerReady | BatchStrOutput | DetokenizerHeartbeat
AnyMessage = ToScheduler | FromRank | FromScheduler | FromDetokenizer | ScheduleBatch | BatchTokenIDOutput | TextEnded

MANAGER = "tokenizer_manager"
SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"


def worker_name(rank: int) -> str:
    """The process name of a rank, as in logs and links."""
    return f"tp_worker.{rank}"


class Link(Part, frozen=True):
    """One direction between two processes; its socket is the file `SENDER-RECEIVER` in the run directory."""

    sender: str
    receiver: str

    @property
    def name(self) -> str:
        """The socket's file name."""
        return f"{self.sender}-{self.receiver}"


def manager_to_scheduler() -> Link:
    """Requests, aborts, control: `ToScheduler`."""
    return Link(MANAGER, SCHEDULER)


def scheduler_to_rank(rank: int) -> Link:
    """The batch stream: `ScheduleBatch`."""
    return Link(SCHEDULER, worker_name(rank))


def rank_to_scheduler(rank: int) -> Link:
    """Results, acknowledgements, start-up: `FromRank`."""
    return Link(worker_name(rank), SCHEDULER)


def scheduler_to_detokenizer() -> Link:
    """Tokens and token ends: `BatchTokenIDOutput`."""
    return Link(SCHEDULER, DETOKENIZER)


def detokenizer_to_manager() -> Link:
    """Text and final answers: `FromDetokenizer`."""
    return Link(DETOKENIZER, MANAGER)


def detokenizer_to_scheduler() -> Link:
    """Text ends: `TextEnded`."""
    return Link(DETOKENIZER, SCHEDULER)


def scheduler_to_manager() -> Link:
    """Control replies, snapshots, start-up; never text, never an end: `FromScheduler`."""
    return Link(SCHEDULER, MANAGER)
