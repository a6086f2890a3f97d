"""What may wait: calls are refused before they cost anything, and told when to come back.

The scheduler is the authority on its queue. What is known here is the last that it told, and what was sent to it since.
"""

import math
from collections import deque

import msgspec

from ..common.config import QUEUED_KV_CACHES
from ..common.messages import LoadSnapshot
from .api_error import RETRY_SECONDS, APIError, bad_request, queue_full
from .metrics import Metrics

WINDOW_SECONDS = 10.0
MIN_WINDOW_SECONDS = 1.0
MAX_RETRY_SECONDS = 30


class DrainSample(msgspec.Struct, frozen=True):
    """Totals since boot at one snapshot."""

    now: float
    started_reqs: int
    started_tokens: int
    refused_reqs: int


class QueueBounds:
    """Counts the requests and prompt tokens that wait: at the scheduler, on their way there, or being tokenized."""

    def __init__(self, max_reqs: int, max_tokens: int | None, metrics: Metrics) -> None:
        self._max_reqs = max_reqs
        self._given_max_tokens = max_tokens
        self._metrics = metrics
        self._load: LoadSnapshot | None = None
        self._preparing: dict[str, int] = {}  # HTTP call -> its requests, until they are sent
        self._sent: dict[str, int] = {}  # rid -> prompt tokens, since the last snapshot
        self._sent_tokens = 0
        self._refused_reqs = 0
        self._samples: deque[DrainSample] = deque()  # of the last ten seconds in which the queue was never empty

    @property
    def num_reqs(self) -> int:
        """Requests that wait."""
        told = self._load.num_queue_reqs if self._load else 0
        return told + len(self._sent) + sum(self._preparing.values())

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait; those of requests that are not tokenized yet are not known."""
        return (self._load.num_queue_tokens if self._load else 0) + self._sent_tokens

    @property
    def max_tokens(self) -> float:
        """Most prompt tokens that may wait; without a flag it is known from the first snapshot on."""
        known = self._given_max_tokens or (self._load and QUEUED_KV_CACHES * self._load.max_total_num_tokens)
        return known or math.inf

    # ---- a call's way -----------------------------------------------------------------------------------------------

    def enter(self, call_id: str, num_reqs: int) -> None:
        """A call is about to be tokenized: count it, or raise the 429."""
        if num_reqs > self._max_reqs:
            message = f"The call brings {num_reqs} requests at once, and at most {self._max_reqs} may wait here."
            raise bad_request(message, code="batch_too_large")
        if self.num_reqs + num_reqs > self._max_reqs:
            raise self._refuse(num_reqs, f"{self.num_reqs} requests wait, and at most {self._max_reqs} may.")
        if self.num_tokens >= self.max_tokens:
            raise self._refuse(num_reqs, f"{self.num_tokens} prompt tokens wait, and at most {self.max_tokens} may.")
        self._preparing[call_id] = num_reqs

    def check_tokens(self, call_id: str, num_tokens: int) -> None:
        """A call has been tokenized: raise the 429 if its tokens are too many beside those that wait.

        Where none wait it passes, whatever its size. So does what never entered (a probe).
        """
        num_reqs = self._preparing.get(call_id)
        if num_reqs is not None and self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            waiting = f"{self.num_tokens} prompt tokens wait, this call has {num_tokens}"
            raise self._refuse(num_reqs, f"{waiting}, and at most {self.max_tokens} may.", num_tokens)

    def leave(self, call_id: str) -> None:
        """A call's requests are sent, or it has ended without."""
        self._preparing.pop(call_id, None)

    def on_sent(self, rid: str, num_tokens: int) -> None:
        """A request is on its way to the scheduler."""
        self._sent[rid] = num_tokens
        self._sent_tokens += num_tokens

    def on_output(self, rid: str) -> None:
        """A request waits no more."""
        self._sent_tokens -= self._sent.pop(rid, 0)

    def on_refused(self) -> int:
        """The scheduler has turned a request away; when to come back, in seconds."""
        self._refused_reqs += 1
        return self.retry_seconds()

    # ---- the scheduler's figures ------------------------------------------------------------------------------------

    def on_load(self, load: LoadSnapshot, now: float) -> None:
        """A snapshot has come: it counts what was sent before."""
        self._load = load
        self._sent.clear()
        self._sent_tokens = 0
        if not load.num_queue_reqs:
            self._samples.clear()
        self._samples.append(DrainSample(now, load.started_reqs_total, load.started_tokens_total, self._refused_reqs))
        while len(self._samples) > 2 and self._samples[1].now <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def retry_seconds(self, num_tokens: int = 0) -> int:
        """When the queue will have room, at its measured rate, for all that were refused meanwhile: 1 to 30.

        Two seconds while nothing is known of the rate; 30 when nothing leaves the queue.
        """
        if self._load is None:
            return RETRY_SECONDS
        if self._load.is_paused:
            return MAX_RETRY_SECONDS
        first, last = self._samples[0], self._samples[-1]
        seconds = last.now - first.now
        if seconds < MIN_WINDOW_SECONDS:
            return RETRY_SECONDS
        reqs_ahead = self._refused_reqs - first.refused_reqs
        tokens_over = max(0, self.num_tokens + num_tokens - self.max_tokens)
        by_reqs = _seconds_to_drain(reqs_ahead, last.started_reqs - first.started_reqs, seconds)
        by_tokens = _seconds_to_drain(tokens_over, last.started_tokens - first.started_tokens, seconds)
        return min(max(1, math.ceil(min(max(by_reqs, by_tokens), MAX_RETRY_SECONDS))), MAX_RETRY_SECONDS)

    def _refuse(self, num_reqs: int, why: str, num_tokens: int = 0) -> APIError:
        self._refused_reqs += num_reqs
        self._metrics.inc("num_refused_requests_total", "queue_full", by=num_reqs)
        seconds = self.retry_seconds(num_tokens)
        return queue_full(f"The queue is full: {why} Try again in {seconds} s.", seconds)


def _seconds_to_drain(amount: float, num_drained: int, seconds: float) -> float:
    """How long `amount` takes where `num_drained` took `seconds`."""
    if not amount:
        return 0.0
    return amount * seconds / num_drained if num_drained else math.inf
