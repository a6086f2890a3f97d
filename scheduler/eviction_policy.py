"""Which cached runs go first when pages are short: a policy is a pure key of a run, and the least key goes first.

lru, mru, lfu and fifo are the classic replacement orders (Denning 1970; Sleator and Tarjan 1985 for the bounds);
priority keeps what urgent requests have used.
"""

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

EvictionKey = tuple[int, int]
NO_PRIORITY = -(1 << 63)  # of a run that no request has finished with: below every request's


class CachedRun(Protocol):
    """What policies and the heap know of a node of the radix tree; times are counts of accesses."""

    last_access: int
    creation: int  # when it was inserted
    hit_count: int  # requests that used it and are done
    priority: int  # the highest of those requests; a larger number is more urgent
    heap_key: EvictionKey | None  # of its newest entry in the heap; None: it has none

    @property
    def is_evictable(self) -> bool:
        """Whether nobody uses it and nothing hangs below it."""
        ...


Policy = Callable[[CachedRun], EvictionKey]


def least_recently_used(run: CachedRun) -> EvictionKey:
    """What has not been used for the longest time."""
    return (run.last_access, 0)


def most_recently_used(run: CachedRun) -> EvictionKey:
    """What was used last: for loops over more than the cache holds, where lru evicts each prefix just before its turn."""
    return (-run.last_access, 0)


def least_frequently_used(run: CachedRun) -> EvictionKey:
    """What the fewest requests used, then lru: a flood of prompts that come once leaves the popular prefixes alone."""
    return (run.hit_count, run.last_access)


def first_in_first_out(run: CachedRun) -> EvictionKey:
    """What was cached first: no prefix stays for ever, however often it is used."""
    return (run.creation, 0)


def lowest_priority(run: CachedRun) -> EvictionKey:
    """What only the least urgent requests used, then lru: bulk work does not push out the prefixes of urgent work."""
    return (run.priority, run.last_access)


POLICIES: dict[str, Policy] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "mru": most_recently_used,
    "priority": lowest_priority,
}

RunT = TypeVar("RunT", bound=CachedRun)


class EvictionHeap(Generic[RunT]):
    """The evictable runs in the policy's order, O(log n) each; corrected when an entry comes up, not when a key changes.

    An entry whose run has a later key by now is pushed anew when it comes up. A run whose key became earlier (only mru
    does that) gets a second entry at once; the one that it replaces is skipped.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[tuple[EvictionKey, int, RunT]] = []  # (key when pushed, tie breaker, run)
        self._num_pushed = 0
        self._num_replaced = 0

    def push(self, run: RunT) -> None:
        """Enter `run`, if it is evictable and has no entry that comes up in time."""
        if not run.is_evictable:
            return
        key = self._policy(run)
        if run.heap_key is not None:
            if run.heap_key <= key:
                return
            self._num_replaced += 1
        run.heap_key = key
        self._num_pushed += 1
        heapq.heappush(self._entries, (key, self._num_pushed, run))
        if self._num_replaced > len(self._entries) // 2:
            self._drop_replaced()

    def pop(self) -> RunT | None:
        """Take out the evictable run with the least key; None when there is none."""
        while self._entries:
            key, _, run = heapq.heappop(self._entries)
            if key != run.heap_key:
                self._num_replaced -= 1
                continue
            run.heap_key = None
            if run.is_evictable and self._policy(run) == key:
                return run
            self.push(run)  # later, or when it is evictable again
        return None

    def _drop_replaced(self) -> None:
        """Keep the heap in proportion to the runs in it; the cost is paid by the pushes that replaced."""
        self._entries = [entry for entry in self._entries if entry[0] == entry[2].heap_key]
        self._num_replaced = 0
        heapq.heapify(self._entries)
