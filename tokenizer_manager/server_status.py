"""What the server says of itself: whether it is alive, whether it takes work, and when the last of it is done."""

import asyncio
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..common.links import DETOKENIZER, SCHEDULER
from ..common.messages import DetokenizerHeartbeat, DetokenizerReady, LoadProgress, LoadSnapshot, SchedulerReady
from ..common.tokenizer import Tokenizer
from .api_error import unavailable
from .metrics import Metrics
from .prompt_encoder import PromptEncoder

SILENCE_SECONDS = 30.0  # a process that is not heard of for longer is not alive


class Status(enum.Enum):
    """Whether the server takes work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ServerStatus:
    """starting -> ready -> draining, or failed; what the model is; how many HTTP calls are open.

    `is_full` says that the link to the scheduler takes no more for now.
    """

    def __init__(self, metrics: Metrics, is_full: Callable[[], bool], clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self.clock = clock
        self.status = Status.STARTING
        self.failure = ""
        self.model: SchedulerReady | None = None
        self.load: LoadSnapshot | None = None
        self.last_output = 0.0  # when tokens of any request came last; 0 before the first
        self._is_full = is_full
        self._encoder: PromptEncoder | None = None
        self._detokenizer_ready = False
        self._last_heard: dict[str, float] = {}  # of the processes that send heartbeats, once they are ready
        self._started = asyncio.Event()
        self._loaded_bytes: dict[int, tuple[int, int]] = {}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the model --------------------------------------------------------------------------------------------------

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Bring the tokenizer; the server is ready when it and both Ready messages are here."""
        self._encoder = PromptEncoder(tokenizer)
        self._check_started()

    @property
    def encoder(self) -> PromptEncoder:
        """From prompts to ids, with the model's tokenizer; there once the server is ready."""
        assert self._encoder is not None
        return self._encoder

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        assert self.model is not None
        return self.model.vocab_size

    @property
    def context_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        assert self.model is not None
        return self.model.context_len

    @property
    def loaded_share(self) -> float:
        """How much of the weights is loaded, over all ranks that have told: 0 to 1."""
        total = sum(total for _, total in self._loaded_bytes.values())
        return sum(loaded for loaded, _ in self._loaded_bytes.values()) / max(total, 1)

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def silent_seconds(self) -> float:
        """How long nothing has been heard of the process that is silent longest; 0 before any is ready."""
        return self.clock() - min(self._last_heard.values(), default=self.clock())

    @property
    def silent_process(self) -> str:
        """The process that is silent longest."""
        return min(self._last_heard, key=self._last_heard.__getitem__, default="")

    async def wait_until_ready(self) -> None:
        """Return once the server has taken work, or could."""
        await self._started.wait()

    @property
    def is_alive(self) -> bool:
        """Whether the server can still do its work, now or once it has started."""
        return self.status is not Status.FAILED and self.silent_seconds < SILENCE_SECONDS

    @property
    def is_paused(self) -> bool:
        """Whether the scheduler plans no steps, by its last snapshot."""
        return self.load is not None and self.load.is_paused

    def check_started(self) -> None:
        """Raise the 503 while there is no scheduler to talk to."""
        if self.status in {Status.STARTING, Status.FAILED}:
            self.check_accepting()

    def check_accepting(self) -> None:
        """Raise the 503 that says why no work is taken, if so."""
        if self.status is Status.STARTING:
            raise unavailable("The server is starting; the model is not loaded yet.", "not_ready")
        if self.status is Status.DRAINING:
            raise unavailable("The server is shutting down and takes no new requests.", "draining", close=True)
        if self.status is Status.FAILED:
            raise unavailable("The server has failed and is shutting down.", "engine_failed", close=True)
        if self._is_full():
            raise unavailable("The server has more work than it can take.", "overloaded")

    def start_draining(self) -> None:
        """Refuse new work from now on; what runs goes on. `wait_idle` tells when it has ended."""
        if self.status is not Status.FAILED:
            self.status = Status.DRAINING

    def _on_status(
        self, message: LoadProgress | SchedulerReady | DetokenizerReady | LoadSnapshot | DetokenizerHeartbeat
    ) -> None:
        match message:
            case LoadProgress():
                self._loaded_bytes[message.rank] = (message.loaded_bytes, message.total_bytes)
            case SchedulerReady():
                self._last_heard[SCHEDULER] = self.clock()
                self.model = message
            case DetokenizerReady():
                self._last_heard[DETOKENIZER] = self.clock()
                self._detokenizer_ready = True
            case DetokenizerHeartbeat():
                self._last_heard[DETOKENIZER] = self.clock()
                self.metrics.count_dropped_frames(DETOKENIZER, message.dropped_frames_total)
            case LoadSnapshot():
                self._last_heard[SCHEDULER] = self.clock()
                self.load = message
                self.metrics.on_load(message)
        self._check_started()

    def _check_started(self) -> None:
        parts = (self.model, self._encoder, self._detokenizer_ready or None)
        if self.status is Status.STARTING and None not in parts:
            self.status = Status.READY
            self._started.set()

    # ---- open calls -------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """HTTP calls for work that have not been answered to their end."""
        return self._num_open

    @contextmanager
    def open_call(self) -> Iterator[None]:
        """An HTTP call for work: refused while the server takes none, counted until it has been answered."""
        self.check_accepting()
        self._count_open(1)
        try:
            yield
        finally:
            self._count_open(-1)

    async def wait_idle(self) -> None:
        """Return when no HTTP call for work is open."""
        await self._idle.wait()

    def _count_open(self, change: int) -> None:
        self._num_open += change
        self.metrics.set("num_open_reqs", self._num_open)
        if self._num_open:
            self._idle.clear()
        else:
            self._idle.set()
