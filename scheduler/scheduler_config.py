"""What flags and workers say to the scheduler."""

import msgspec

from ..common.config import QUEUED_KV_CACHES


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names and defaults are those of ServerArgs; a time limit of 0 seconds is none.

    `decode_width` is the most tokens that one step may give a decode row.
    """

    num_pages: int
    page_size: int
    vocab_size: int
    context_len: int
    max_running_requests: int
    chunked_prefill_size: int = 512  # AUTO_CHUNK: measured; -1: no chunking
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    schedule_ageing_steps: int = 1000
    schedule_conservativeness: float = 1.0
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    max_queued_requests: int = 2048
    max_queued_tokens: int | None = None
    request_waiting_timeout: float = 0.0
    request_timeout: float = 0.0
    radix_eviction_policy: str = "lru"
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    random_seed: int = 0
    decode_width: int = 1

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be planned and not answered."""
        return 1 if self.disable_overlap_schedule else 2

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def queued_tokens_limit(self) -> int:
        """Prompt tokens that may wait."""
        return self.max_queued_tokens or QUEUED_KV_CACHES * self.num_kv_tokens
