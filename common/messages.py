"""The protocol: every message between processes, in the order of a token's life.

    start    rank -> scheduler -> tokenizer manager       LoadProgress, WorkerReady, SchedulerReady, DetokenizerReady
    ask      tokenizer manager -> scheduler               TokenizedGenerateReqInput, AbortReq; control: FlushCacheReqInput,
                                                          PauseGenerationReqInput, ContinueGenerationReqInput, ExplainReqInput
    plan     scheduler -> every rank                      ScheduleBatch
    result   rank -> scheduler                            BatchResult, GrammarReady (rank 0), StepAck (every rank)
    tokens   scheduler -> detokenizer                     BatchTokenIDOutput
    text     detokenizer -> tokenizer manager             BatchStrOutput
    end      detokenizer -> scheduler                     TextEnded
    status   scheduler -> tokenizer manager               LoadSnapshot, ControlReqOutput, ExplainReqOutput
             detokenizer -> tokenizer manager             DetokenizerHeartbeat

Here are start, ask and status; plan and result are in batch_messages.py, tokens, text and end in text_messages.py. Every
link carries a closed tagged union (links.py); a frame that is not of it is dropped by the receiver.
Integer columns travel as packed native int32 (`Int32s`): `pack_int32` and `unpack_int32`.
"""

from array import array
from collections.abc import Iterable

import msgspec

from .logprobs import LogprobReq
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
    `grammar` is llguidance's, which every output follows. `pooling` (one of POOLINGS) asks for one vector of the prompt
    and for no output.
    With `sampling_params.n` above 1 it stands for so many requests, whose rids `child_rid` gives; an abort may name it.
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
    logprobs: LogprobReq | None = None
    grammar: str | None = None
    pooling: str | None = None


POOLINGS = ("last", "mean")  # the hidden state of the prompt's last token, or the mean over all of them


def child_rid(rid: str, index: int, n: int) -> str:
    """The rid of answer `index` of `n` to one request."""
    return rid if n == 1 else f"{rid}-{index}"


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
    output_tokens_total: int = 0  # counted as they come, those that a text end drops too
    num_grammar_queue_reqs: int = 0
    grammar_reqs_total: int = 0
    grammar_timeouts_total: int = 0


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

    `what` is grammar, queued, refused, blocked, waited, backfilled, admitted, chunk, first_token, retracted, preempted, text_ended,
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
