"""A request as the scheduler knows it: its tokens, its place in the KV cache, and where it is in its life."""

from array import array
from enum import Enum, auto
from typing import NamedTuple

from ..common.batch_messages import NO_GRAMMAR
from ..common.logprobs import LogprobBuffer, LogprobReq
from ..common.messages import TokenizedGenerateReqInput
from .radix_tree import TreeNode

NO_ROW = -1
NO_STEP = -1


class Range(NamedTuple):
    """Positions start .. end-1, absolute in the request's tokens."""

    start: int
    end: int


class ReqStatus(Enum):
    """Where a request is; it is in exactly one place of the scheduler for each."""

    WAITING = auto()  # in waiting_queue
    GRAMMAR = auto()  # in grammar_queue, ahead of the waiting_queue: its grammar is not compiled yet
    PREFILLING = auto()  # the chunked_req: it holds a row, and part of its prompt is not planned yet
    RUNNING = auto()  # in running_batch: every known token is computed or planned
    RETRACTED = auto()  # in waiting_queue again, with the outputs that it has
    ENDING = auto()  # its end is decided, and steps in flight may still touch its pages
    FINISHED = auto()  # nowhere


TRANSITIONS: dict[ReqStatus, tuple[ReqStatus, ...]] = {
    ReqStatus.WAITING: (ReqStatus.GRAMMAR, ReqStatus.PREFILLING, ReqStatus.RUNNING, ReqStatus.FINISHED),
    ReqStatus.GRAMMAR: (ReqStatus.WAITING, ReqStatus.FINISHED),
    ReqStatus.PREFILLING: (ReqStatus.RUNNING, ReqStatus.RETRACTED, ReqStatus.ENDING, ReqStatus.FINISHED),
    ReqStatus.RUNNING: (ReqStatus.RETRACTED, ReqStatus.ENDING, ReqStatus.FINISHED),
    ReqStatus.RETRACTED: (ReqStatus.PREFILLING, ReqStatus.RUNNING, ReqStatus.FINISHED),
    ReqStatus.ENDING: (ReqStatus.FINISHED,),
    ReqStatus.FINISHED: (),
}


QUEUED = (ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.GRAMMAR)


class Req:
    """One request.

    `token_ids` is the prompt and the outputs known so far. Of its KV, `kv_committed_len` tokens are computed (their
    results are back) and `kv_allocated_len` are computed or planned. `page_ids` is its page table, which has room for
    `num_slots` tokens: its first `num_tree_pages` belong to the radix tree (`last_node`, locked), the others to the
    request alone. `num_left_to_plan` outputs may still be planned: each row that samples takes one, or more when its
    result brings more, so that no step is ever planned past `max_new_tokens` (which ends with the context).
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "counts_prompt",
        "end_token_ids",
        "enqueued_step",
        "extend_range",
        "family",
        "first_scheduled",
        "grammar",
        "has_started",
        "ignore_eos",
        "is_private",
        "is_prompt_only",
        "kv_allocated_len",
        "kv_committed_len",
        "last_node",
        "last_step",
        "logprob_start",
        "matched_len",
        "max_len",
        "max_new_tokens",
        "message",
        "namespace",
        "num_backfills",
        "num_left_to_plan",
        "num_retractions",
        "num_sent_pages",
        "num_slots",
        "num_tree_pages",
        "num_waited_steps",
        "page_ids",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "rid",
        "row",
        "row_generation",
        "status",
        "token_ids",
        "waits_for",
        "waits_since",
    )

    def __init__(
        self, message: TokenizedGenerateReqInput, token_ids: "array[int]", max_new_tokens: int, priority: int = 0
    ) -> None:
        self.message = message
        self.rid = message.rid
        self.arrival = message.arrival
        self.priority = priority  # a larger number is more urgent
        self.namespace = (message.lora_id, message.cache_salt)
        self.token_ids = token_ids
        self.prompt_len = len(token_ids)
        self.max_new_tokens = max_new_tokens
        self.max_len = len(token_ids) + max_new_tokens
        params = message.sampling_params
        ends = () if params.ignore_eos else (*message.eos_token_ids, *params.stop_token_ids)
        self.end_token_ids = frozenset(ends)
        self.status = ReqStatus.WAITING
        self.num_retractions = 0
        self.cached_tokens = 0
        self.is_prompt_only = params.max_new_tokens == 0  # then the token behind the prompt is sampled and dropped
        self.logprob_start = (message.logprobs or LogprobReq()).resolved(self.prompt_len).start_len
        self.prompt_logprobs = LogprobBuffer()  # of the prompt tokens up to logprob_start, until the first output
        self.ignore_eos = params.ignore_eos  # then only its length ends it
        self.enqueued_step = 0  # the step that was next when it arrived
        self.matched_len = 0  # tokens that the tree holds for it while it waits, where the policy asks for that
        self.waits_since = 0  # while it waits: the step since which it would have waited without a break
        self.num_waited_steps = 0  # while it does not: how long it has waited in all
        self.num_backfills = 0  # requests that have gone ahead of it while it was blocked
        self.first_scheduled: float | None = None
        self.grammar = NO_GRAMMAR  # its number in the batch stream
        self.family: str | None = None  # the rid of the request for several answers that it is one of
        self.counts_prompt = True  # or another one of the family does
        self.has_started = False  # its StreamStart is sent
        self.waits_for: tuple[Req, int] | None = None  # a request that computes a prefix of ours, and its length
        self.reset_cache_state()

    def reset_cache_state(self) -> None:
        """Hold no row and no pages."""
        self.row = NO_ROW
        self.row_generation = 0
        self.extend_range = Range(0, 0)
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.page_ids: list[int] = []
        self.num_slots = 0
        self.num_tree_pages = 0
        self.num_sent_pages = 0
        self.last_node: TreeNode | None = None
        self.is_private = False  # another request was first to cache the same pages: ours enter the tree at the end
        self.last_step = NO_STEP
        self.num_left_to_plan = self.max_new_tokens - self.num_outputs

    def move_to(self, status: ReqStatus) -> None:
        """Change the status; AssertionError for a transition that the table does not allow."""
        assert status in TRANSITIONS[self.status], f"request {self.rid}: {self.status.name} -> {status.name}"
        self.status = status

    @property
    def num_outputs(self) -> int:
        """Outputs known so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def max_cached_len(self) -> int:
        """Known tokens that need not be computed: all but the last one, and those whose states or logits are wanted."""
        if self.message.pooling == "mean":
            return 0
        known_len = len(self.token_ids)
        return min(known_len - 1, self.logprob_start) if self.logprob_start < self.prompt_len - 1 else known_len - 1

    @property
    def is_queued(self) -> bool:
        """Whether it is in the waiting queue, or in the grammar queue ahead of it, and so holds no row."""
        return self.status in QUEUED

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that it brings when it starts, as far as nothing of them is cached. A family's prompt counts once."""
        return len(self.token_ids) if self.counts_prompt else self.num_outputs

    def key(self, start: int, end: int) -> bytes:
        """Tokens start .. end-1 as a key of the radix tree."""
        return self.token_ids[start:end].tobytes()

    def keep_outputs(self, num_outputs: int) -> None:
        """Drop the outputs after the first `num_outputs`, with their KV."""
        del self.token_ids[self.prompt_len + num_outputs :]
        self.kv_committed_len = min(self.kv_committed_len, len(self.token_ids))
