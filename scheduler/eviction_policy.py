"""Which cached runs go first when pages are short: a policy is a pure key of a run, and the least key goes first.

lru, mru, lfu and fifo are the classic replacement orders (Denning 1970; Sleator and Tarjan 1985 for the bounds);
priority keeps what urgent requests have used.
"""

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

EvictionKey = int
NO_PRIORITY = -(1 << 63)  # of a run that no request has finished with: below every request's
THEN = 1 << 64  # `first * THEN + second`: by the first, then by the second


class CachedRun(Protocol):
    """What policies and the heap know of a node of the radix tree; times are counts of accesses."""

    last_access: int
    creation: int  # when it was inserted
    hit_count: int  # requests that used it and are done
    priority: int  # the highest of those requests; a larger number is more urgent
    heap_key: int | None  # what stands for it in the heap: its key and a number

    @property
    def is_evictable(self) -> bool:
        """Whether nobody uses it and nothing hangs below it."""
        ...


Policy = Callable[[CachedRun], EvictionKey]


def least_recently_used(run: CachedRun) -> EvictionKey:
    """What has not been used for the longest time."""
    return run.last_access


def most_recently_used(run: CachedRun) -> EvictionKey:
    """What was used last: for loops over more than the cache holds, where lru evicts each prefix just before its turn."""
    return -run.last_access


def least_frequently_used(run: CachedRun) -> EvictionKey:
    """What the fewest requests used, then lru: a flood of prompts that come once leaves the popular prefixes alone."""
    return run.hit_count * THEN + run.last_access


def first_in_first_out(run: CachedRun) -> EvictionKey:
    """What was cached first: no prefix stays for ever, however often it is used."""
    return run.creation


def lowest_priority(run: CachedRun) -> EvictionKey:
    """What only the least urgent requests used, then lru: bulk work does not push out the prefixes of urgent work."""
    return run.priority * THEN + run.last_access


POLICIES: dict[str, Policy] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "mru": most_recently_used,
    "priority": lowest_priority,
}

RunT = TypeVar("RunT", bound=CachedRun)
NUMBER_BITS = 48  # of an entry: its key above, the number of its push below
NUMBERS = (1 << NUMBER_BITS) - 1


class EvictionHeap(Generic[RunT]):
    """The evictable runs in the policy's order, O(log n) each; corrected when an entry comes up, not when a key changes.

    An entry whose run has a later key by now is pushed anew when it comes up. A run whose key became earlier (only mru
    does that) gets another entry at once, and the one that it replaces is skipped. Entries are plain integers, which
    compare several times faster than tuples.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[int] = []
        self._runs: dict[int, RunT] = {}  # by the number of the entry that stands for it
        self._num_pushed = 0

    def push(self, run: RunT) -> None:
        """Enter `run`, if it is evictable and has no entry that comes up in time."""
        if not run.is_evictable:
            return
        key = self._policy(run)
        if run.heap_key is not None:
            if run.heap_key >> NUMBER_BITS <= key:
                return
            del self._runs[run.heap_key & NUMBERS]
        self._num_pushed += 1
        self._runs[self._num_pushed] = run
        run.heap_key = key << NUMBER_BITS | self._num_pushed
        heapq.heappush(self._entries, run.heap_key)
        self._drop_replaced()

    def pop(self) -> RunT | None:
        """Take out the evictable run with the least key; None when there is none."""
        while self._entries:
            entry = heapq.heappop(self._entries)
            run = self._runs.pop(entry & NUMBERS, None)
            if run is None:
                continue  # replaced
            run.heap_key = None
            if run.is_evictable and self._policy(run) == entry >> NUMBER_BITS:
                self._drop_replaced()
                return run
            self.push(run)  # later, or when it is evictable again
        return None

    def _drop_replaced(self) -> None:
        """Keep the heap in proportion to the runs in it; the pushes and pops since the last time have paid for it."""
        if len(self._entries) <= 2 * len(self._runs):
            return
        self._entries = [run.heap_key for run in self._runs.values() if run.heap_key is not None]
        heapq.heapify(self._entries)
