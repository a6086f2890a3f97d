"""The waiting requests, in the order in which they are considered: the aged ones first, then as the policy says.

A request that has waited `schedule_ageing_steps` steps in all goes ahead of the policy's order, and of priorities; aged
ones go by arrival. So no policy starves anyone. Let L be the most steps that a request holds its row, A the ageing steps.

    When rows are the limit, a request starts at most A + 3 L steps later than under fcfs.

Let r arrive at step a and start at F under fcfs and at P under the policy, with N rows. Let t be the last step before P
at which a row was idle under the policy; if t >= a, r started at once. From t on all rows work, on (1) what ran at t, at
most (N - 1) L row-steps; (2) requests that came after t and before r, w row-steps in all; (3) requests that came later
than r, which start before step a + A only, so at most L steps of each row after a + A, and what was started and ended
before. fcfs has started all of (2) when it starts r, and has at most (N - 1) L row-steps of them left to do, so
w <= N (F - t) + (N - 1) L. At P all of (1) to (3) is done or running: N (P - t) <= (N - 1) L + w + N (A + L), which
gives P - F <= A + L + 2 L (N - 1) / N.

    Whatever the limit is, it starts at most A + (K + 1) L steps after its arrival (and so after its start under fcfs),
    where K requests that came earlier still wait when it ages.

Once it has aged only those K go ahead of it. The first of them starts at the latest when all that runs has ended, after
L steps, since backfilling does not make the first one wait (as far as lifetimes are known); then it is the next one's turn.

fcfs itself needs no ageing. Time that a request spent running does not count as waiting, so one that was preempted
does not come back ahead of the one that took its place.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from .radix_tree import RadixCache
from .req import Req
from .schedule_policy import ArrivalOrder, by_arrival, make_policy
from .scheduler_config import SchedulerConfig
from .sorted_reqs import SortedReqs


def _waits_since(req: Req) -> int:
    return req.waits_since


class WaitingQueue:
    """O(log n) to add and to remove; the order is made as far as it is asked for, never sorted anew."""

    def __init__(self, config: SchedulerConfig, tree_cache: RadixCache) -> None:
        self.num_tokens = 0
        self.lowest_priority: int | None = None  # of all that ever waited here
        self._ageing_steps = config.schedule_ageing_steps
        self._by_arrival = SortedReqs(by_arrival)
        self._by_wait = SortedReqs(_waits_since)
        self._policy = make_policy(config, tree_cache, self._by_arrival)
        self._step = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._by_arrival)

    def add(self, req: Req, step: int) -> None:
        """A request waits from `step` on."""
        self._step = step
        self.num_tokens += req.num_waiting_tokens
        if self.lowest_priority is None or req.priority < self.lowest_priority:
            self.lowest_priority = req.priority
        req.waits_since = step - req.num_waited_steps
        self._by_arrival.add(req)
        self._by_wait.add(req)
        self._policy.add(req)

    def remove(self, req: Req) -> None:
        """It waits no more; KeyError if it did not."""
        self._by_arrival.remove(req)
        self._by_wait.remove(req)
        self._policy.remove(req)
        self.num_tokens -= req.num_waiting_tokens
        req.num_waited_steps = max(0, self._step - req.waits_since)

    def candidates(self, step: int, running: Collection[Req]) -> Iterator[Req]:
        """The order for `step`. Adding and removing ends the iteration."""
        self._step = step
        if isinstance(self._policy, ArrivalOrder):
            return iter(self._by_arrival)
        num_aged = self._by_wait.num_up_to(step - self._ageing_steps)
        if num_aged == 0:
            return self._policy.order(running)
        others = (req for req in self._policy.order(running) if not self.is_aged(req, step))
        return chain(self._aged(step, num_aged), others)

    def is_aged(self, req: Req, step: int) -> bool:
        """Whether this waiting request goes ahead of the policy's order."""
        return step - req.waits_since >= self._ageing_steps

    def had_aged(self, req: Req) -> bool:
        """Whether this running request had aged when it was admitted: it would go first again."""
        return req.num_waited_steps >= self._ageing_steps

    def oldest_waiting_seconds(self, now: float) -> float:
        """How long ago the first of them arrived; 0.0 when nobody waits."""
        return next((max(0.0, now - req.arrival) for req in self._by_arrival), 0.0)

    def _aged(self, step: int, num_aged: int) -> Iterator[Req]:
        """By arrival, which is nearly the order in which they age: few others are passed over."""
        for req in self._by_arrival:
            if self.is_aged(req, step):
                yield req
                num_aged -= 1
                if num_aged == 0:
                    return
