"""What the clients of a simulation see, and what the report says of it. Times in seconds of virtual time."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...common.finish_reason import FINISH_ABORT
from ...common.messages import LoadSnapshot
from ...common.text_messages import BatchTokenIDOutput
from .step_shape import read_int32

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
OK = 200


class Spread(msgspec.Struct, frozen=True):
    """Of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are per second from the first request to the last end; goodput counts the requests that met both
    targets. The hit rate is the share of the prompt tokens that were not computed, of the first starts.
    """

    policy: str
    num_requests: int
    num_failed: int
    first_error: str | None
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_target_ms: float
    tpot_target_ms: float
    goodput_per_s: float
    goodput_share: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    queue_ms: Spread
    ttft_ms_by_priority: dict[int, Spread]
    hit_rate: float
    num_retractions: int
    num_preemptions: int
    num_backfills: int
    num_steps: int
    worker_busy_share: float


class Measurements:
    """Gathers the outputs of one run; arrays are indexed by request."""

    def __init__(self, num_requests: int) -> None:
        self.sent = np.full(num_requests, np.nan)
        self.first = np.full(num_requests, np.nan)
        self.last = np.full(num_requests, np.nan)
        self.ended = np.full(num_requests, np.nan)
        self.num_tokens = np.zeros(num_requests, np.int64)
        self.status = np.zeros(num_requests, np.int64)
        self.first_error: str | None = None
        self.worker_seconds = 0.0
        self.queue_seconds: list[float] = []
        self._gaps: list[NDArray[np.float32]] = []
        self._counts: LoadSnapshot | None = None

    def on_output(self, output: BatchTokenIDOutput, now: float) -> list[int]:
        """Tokens and ends reach their clients; returns the requests that ended."""
        if output.rids:
            requests = np.array(list(map(int, output.rids)))
            before = self.last[requests]
            is_first = np.isnan(before)
            if is_first.any():
                self.first[requests[is_first]] = now
                before = before[~is_first]
            self._gaps.append((now - before).astype(np.float32))
            self.last[requests] = now
            self.num_tokens[requests] += read_int32(output.num_tokens)
        for end in output.ends:
            index, reason = int(end.rid), end.finish_reason
            self.ended[index] = now
            self.status[index] = OK
            if isinstance(reason, FINISH_ABORT):
                self.status[index] = reason.status_code
                self.first_error = self.first_error or f"{reason.status_code}: {reason.message}"
        return [int(end.rid) for end in output.ends]

    def on_snapshot(self, snapshot: LoadSnapshot) -> None:
        """Keep the scheduler's counters, and its observations since the last snapshot."""
        self._counts = snapshot
        self.queue_seconds += snapshot.queue_seconds

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return int((self.status == 0).sum())

    def gaps(self) -> NDArray[np.float32]:
        """Times between two outputs of one request, of all requests."""
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0, np.float32)

    def curves(self) -> tuple[FloatArray, FloatArray]:
        """TTFT and TPOT of the requests that succeeded, in seconds; TPOT of those with two tokens or more."""
        ok = self.status == OK
        tpot = (self.last - self.first)[ok] / np.maximum(self.num_tokens[ok] - 1, 1)
        return (self.first - self.sent)[ok], tpot[self.num_tokens[ok] > 1]

    def report(
        self, policy: str, input_lens: IntArray, priorities: IntArray, ttft_target_ms: float, tpot_target_ms: float
    ) -> Report:
        """Everything in figures."""
        counts = self._counts
        assert counts is not None, "a run ends with a snapshot"
        ok = self.status == OK
        ttft, num_tokens = (self.first - self.sent)[ok], self.num_tokens[ok]
        tpot = (self.last - self.first)[ok] / np.maximum(num_tokens - 1, 1)
        is_good = (ttft <= ttft_target_ms / 1000) & ((tpot <= tpot_target_ms / 1000) | (num_tokens < 2))
        seconds = float(np.nanmax(self.ended) - np.nanmin(self.sent)) or 1.0
        output_tokens, prompt_tokens = int(num_tokens.sum()), int(input_lens[ok].sum())
        levels = np.unique(priorities)
        return Report(
            policy=policy,
            num_requests=len(self.sent),
            num_failed=int((~ok).sum()),
            first_error=self.first_error,
            seconds=round(seconds, 6),
            requests_per_s=_rate(int(ok.sum()), seconds),
            output_tokens_per_s=_rate(output_tokens, seconds),
            total_tokens_per_s=_rate(output_tokens + prompt_tokens, seconds),
            ttft_target_ms=ttft_target_ms,
            tpot_target_ms=tpot_target_ms,
            goodput_per_s=_rate(int(is_good.sum()), seconds),
            goodput_share=round(float(is_good.sum()) / len(self.sent), 4),
            ttft_ms=spread(ttft),
            tpot_ms=spread(tpot[num_tokens > 1]),
            itl_ms=spread(self.gaps()),
            e2e_ms=spread((self.ended - self.sent)[ok]),
            queue_ms=spread(np.array(self.queue_seconds)),
            ttft_ms_by_priority={int(level): spread(ttft[priorities[ok] == level]) for level in levels}
            if len(levels) > 1
            else {},
            hit_rate=round(counts.cache_hit_tokens_total / max(counts.cache_query_tokens_total, 1), 4),
            num_retractions=counts.retractions_total,
            num_preemptions=counts.preemptions_total,
            num_backfills=counts.backfills_total,
            num_steps=counts.steps,
            worker_busy_share=round(self.worker_seconds / seconds, 4),
        )


def spread(seconds: NDArray[np.floating]) -> Spread:
    """Mean and percentiles, in milliseconds; zeros of nothing."""
    if not len(seconds):
        return Spread(0.0, 0.0, 0.0, 0.0)
    values = (float(seconds.mean()), *np.percentile(seconds, (50, 90, 99)).tolist())
    return Spread(*(round(1000 * value, 4) for value in values))


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 4)
