"""What the scheduler tells of itself: counters since boot and observations since the last snapshot."""

from ..common.messages import LoadSnapshot
from .page_pool import PagePool

BUSY_INTERVAL_SECONDS = 0.1
IDLE_INTERVAL_SECONDS = 1.0


class LoadStats:
    """Counters and observations; the gauges are read when a snapshot is taken."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_output_tokens = 0
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_retractions = 0
        self.num_preemptions = 0
        self.num_backfills = 0
        self.num_broken_invariants = 0
        self.num_started_reqs = 0
        self.num_started_tokens = 0
        self.num_grammar_reqs = 0
        self.num_grammar_timeouts = 0
        self.chunk_tokens = 0  # that the last step might have computed
        self.step_seconds: list[float] = []
        self.queue_seconds: list[float] = []

    def on_step(self, seconds: float, num_tokens: int) -> None:
        """A step's result is back, with so many tokens."""
        self.num_steps += 1
        self.num_output_tokens += num_tokens
        self.step_seconds.append(seconds)

    def on_first_scheduled(
        self, queue_seconds: float, num_prompt_tokens: int, num_hit_tokens: int, *, counts_prompt: bool
    ) -> None:
        """A request is computed for the first time; the queue counted its prompt, or that of another answer to it."""
        self.queue_seconds.append(max(0.0, queue_seconds))
        self.num_query_tokens += num_prompt_tokens
        self.num_hit_tokens += num_hit_tokens
        self.num_started_reqs += 1
        self.num_started_tokens += num_prompt_tokens * counts_prompt

    def take_snapshot(
        self,
        pool: PagePool,
        *,
        num_running_reqs: int,
        num_queue_reqs: int,
        num_grammar_queue_reqs: int,
        num_queue_tokens: int,
        new_token_ratio: float,
        num_dropped: int,
        is_paused: bool,
    ) -> LoadSnapshot:
        """The gauges now, the counters, and the observations, which start anew."""
        num_used_pages = pool.allocator.num_pages - pool.num_available_pages
        snapshot = LoadSnapshot(
            steps=self.num_steps,
            num_running_reqs=num_running_reqs,
            num_queue_reqs=num_queue_reqs,
            num_used_tokens=num_used_pages * pool.page_size,
            num_cached_tokens=pool.tree_cache.evictable_pages * pool.page_size,
            max_total_num_tokens=pool.max_total_num_tokens,
            new_token_ratio=new_token_ratio,
            cache_query_tokens_total=self.num_query_tokens,
            cache_hit_tokens_total=self.num_hit_tokens,
            retractions_total=self.num_retractions,
            dropped_frames_total=num_dropped,
            step_seconds=self.step_seconds,
            queue_seconds=self.queue_seconds,
            num_queue_tokens=num_queue_tokens,
            started_reqs_total=self.num_started_reqs,
            started_tokens_total=self.num_started_tokens,
            preemptions_total=self.num_preemptions,
            backfills_total=self.num_backfills,
            broken_invariants_total=self.num_broken_invariants,
            chunk_tokens=self.chunk_tokens,
            is_paused=is_paused,
            output_tokens_total=self.num_output_tokens,
            num_grammar_queue_reqs=num_grammar_queue_reqs,
            grammar_reqs_total=self.num_grammar_reqs,
            grammar_timeouts_total=self.num_grammar_timeouts,
        )
        self.step_seconds, self.queue_seconds = [], []
        return snapshot


class SnapshotClock:
    """When the next snapshot is due: soon after anything happened, else as a heartbeat."""

    def __init__(self, now: float) -> None:
        self._last = now - IDLE_INTERVAL_SECONDS
        self.has_news = False

    def on_news(self) -> None:
        """Something happened that the next snapshot shows."""
        self.has_news = True

    def seconds_left(self, now: float) -> float:
        """Until the next snapshot is due; 0 when it is."""
        interval = BUSY_INTERVAL_SECONDS if self.has_news else IDLE_INTERVAL_SECONDS
        return max(0.0, self._last + interval - now)

    def on_sent(self, now: float) -> None:
        """A snapshot was sent."""
        self._last = now
        self.has_news = False
