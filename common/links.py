"""The links between processes: who sends what to whom, and the names of processes."""

from .batch_messages import BatchResult, GrammarReady, ScheduleBatch, StepAck
from .messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ControlReqOutput,
    DetokenizerHeartbeat,
    DetokenizerReady,
    ExplainReqInput,
    ExplainReqOutput,
    FlushCacheReqInput,
    LoadProgress,
    LoadSnapshot,
    Part,
    PauseGenerationReqInput,
    SchedulerReady,
    TokenizedGenerateReqInput,
    WorkerReady,
)
from .text_messages import BatchStrOutput, BatchTokenIDOutput, TextEnded

ControlReqInput = FlushCacheReqInput | PauseGenerationReqInput | ContinueGenerationReqInput | ExplainReqInput
ControlReply = ControlReqOutput | ExplainReqOutput
ToScheduler = TokenizedGenerateReqInput | AbortReq | ControlReqInput
FromRank = LoadProgress | WorkerReady | BatchResult | StepAck | GrammarReady
FromScheduler = LoadProgress | SchedulerReady | LoadSnapshot | ControlReply
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
