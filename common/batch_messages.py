"""A step as the scheduler plans it, and what comes of it: the messages between scheduler and workers."""

from .logprobs import LogprobReq, TokenLogprobs
from .messages import Int32s, Message, Part
from .sampling_params import SamplingParams

NO_GRAMMAR = -1

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
    logprobs: LogprobReq | None = None
    grammar: int = NO_GRAMMAR  # its number among the announced ones
    pooling: str | None = None


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
    `new_grammars` (number -> llguidance's grammar) are compiled beside the steps, and may be used once a GrammarReady
    says so; `freed_grammars` are used no more.
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
    new_grammars: dict[int, str] = {}
    freed_grammars: Int32s = b""


# ---- result ---------------------------------------------------------------------------------------------------------

ROW_GRAMMAR_ENDED = 1
ROW_ERROR = 2
ROW_REFUSED = 4  # with ROW_ERROR: the request itself is the cause


class BatchResult(Message, frozen=True):
    """Rank 0's result of one step; row order is extend rows, then decode rows.

    `token_ids` is flat: `num_tokens[i]` ids for row i (0 for a middle chunk or a failed row).
    `row_lens` is the number of tokens the row knows after the step (prompt and outputs).
    `flags` are ROW_GRAMMAR_ENDED | ROW_ERROR | ROW_REFUSED; `errors` explains the rows that failed.
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
    logprobs: dict[int, TokenLogprobs] = {}  # row -> of the tokens that it sampled
    prompt_logprobs: dict[int, TokenLogprobs] = {}  # row -> of the prompt tokens whose logits this chunk has computed
    embeddings: dict[int, bytes] = {}  # row -> float32, where a pooled prompt is complete


class GrammarReady(Message, frozen=True):
    """Rank 0 has compiled a grammar, or could not: `error` says why."""

    number: int
    error: str | None = None


class StepAck(Message, frozen=True):
    """A rank has finished a step; feeds the watchdog and never gates a step."""

    rank: int
    step: int
    dropped_frames_total: int = 0
