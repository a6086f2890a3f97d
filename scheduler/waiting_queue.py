"""The waiting requests, in the order in which they are considered."""

import bisect
from collections.abc import Collection, Iterator

from .radix_tree import RadixCache
from .req import Req
from .scheduler_config import SchedulerConfig


def _arrival(req: Req) -> float:
    return req.arrival


class WaitingQueue:
    """First come, first served; a retracted request goes ahead of its equals."""

    def __init__(self, config: SchedulerConfig, tree_cache: RadixCache) -> None:
        self._reqs: list[Req] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req, step: int) -> None:
        """A request waits from `step` on."""
        insort = bisect.insort_left if req.num_retractions else bisect.insort_right
        insort(self._reqs, req, key=_arrival)
        self.num_tokens += req.num_waiting_tokens

    def remove(self, req: Req) -> None:
        """It waits no more."""
        self._reqs.remove(req)
        self.num_tokens -= req.num_waiting_tokens

    def candidates(self, step: int, running: Collection[Req]) -> Iterator[Req]:
        """The order for `step`."""
        return iter(list(self._reqs))
