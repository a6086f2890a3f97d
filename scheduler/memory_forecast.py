"""Memory over the coming steps, if nobody else is admitted: who holds pages, until when, and what comes back then.

Lifetimes are estimates: a request ends when its max_new_tokens are reached, at the latest, and takes `rate` tokens a
step until then: 1 where only its length ends it (ignore_eos), else the share that new_token_ratio expects of it.
Memory is counted in tokens (KV slots).
"""

import bisect
import math
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from .page_pool import PagePool
from .radix_tree import TreeNode
from .req import Req

MAX_WALKS = 4  # over all holders, to find out when a request can start


class Holder(NamedTuple):
    """A request that holds pages. `reserve` is what it is expected to take still, `prompt_left` of it at once."""

    steps_left: int
    rate: float
    prompt_left: int
    reserve: float
    req: Req


class Completion(NamedTuple):
    """A holder ends: `freed_tokens` of what it holds now are then nobody's, or cached and evictable."""

    holder: Holder
    freed_tokens: int


class Joining(NamedTuple):
    """A request that joins in `start` steps; `early`: before those that end then have given their pages back."""

    start: int
    num_steps: int
    early: bool


class MemoryForecast:
    """The holders in the order in which they end."""

    def __init__(self, pool: PagePool, holders: Iterable[Holder]) -> None:
        self._pool = pool
        self._holders = sorted(holders, key=attrgetter("steps_left"))

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: Holder) -> None:
        """One more was admitted."""
        bisect.insort(self._holders, holder, key=attrgetter("steps_left"))

    def completions(self) -> Iterator[Completion]:
        """Who ends next, and what that frees. A shared prefix is freed by the last that uses it.

        Locks count as they are now: with a candidate's prefix locked, that stays.
        """
        page_size = self._pool.page_size
        locks_left: dict[TreeNode, int] = {}
        for holder in self._holders:
            num_pages = num_freed_pages(holder.req, locks_left)
            yield Completion(holder, num_pages * page_size)

    def low_water(self, num_tokens: int, num_steps: int) -> float:
        """The least memory of the coming steps, if a request joins now that takes `num_tokens` at once and one a step.

        The walk of SGLang's add_one_req_ignore_eos: memory is lowest just before a request ends. A page a request is
        kept back, for what its last page wastes. What the candidate has cached has to be locked.
        """
        page_size = self._pool.page_size
        memory = self._pool.num_available_pages * page_size
        return self._low_water(self.completions(), memory - num_tokens, Joining(0, num_steps, early=True), page_size)[0]

    def find_start(self, num_tokens: int, num_steps: int) -> tuple[int, float]:
        """A step before which such a request cannot join, and the least memory from there on: 0.0 if it may be later.

        Each walk rules out the steps up to the next one that could do: starting later by what lacks, or after the
        moment when it lacks. It counts on the last pages being filled up, so it errs towards an early start.
        """
        page_size = self._pool.page_size
        memory = self._pool.num_available_pages * page_size - num_tokens
        unused = sum(holder.req.num_slots - holder.req.kv_allocated_len for holder in self._holders)
        completions, start = list(self.completions()), 0
        for _ in range(MAX_WALKS):
            joining = Joining(start, num_steps, early=start == 0)
            lowest, when = self._low_water(completions, memory + unused, joining, 0)
            if lowest > 0:
                return start, self._left_over(completions, memory, unused, joining)
            start = min(when, start + int(-lowest) + 1) if when > start else self._next_completion(start)
        return start, 0.0

    def _left_over(self, completions: Iterable[Completion], memory: float, unused: int, joining: Joining) -> float:
        """What is certainly left over, at the least, from the start of the request on.

        It may start before the pages of those that end with that step are back, if it needs none of them.
        """
        kept_tokens = 2 * self._pool.page_size - 1  # whatever the last pages waste by then, and from then on
        early = joining._replace(early=True)
        lowest, _ = self._low_water(completions, memory, early, kept_tokens)
        if lowest <= 0 and self._low_water(completions, memory + unused, early, 0)[0] <= 0:
            lowest, _ = self._low_water(completions, memory, joining, kept_tokens)
        return max(0.0, lowest)

    def _next_completion(self, start: int) -> int:
        """When the next one ends, whose pages a request that joins in `start` steps does not find yet."""
        if start == 0 and self._holders and self._holders[0].steps_left == 0:
            return 1
        return next((holder.steps_left for holder in self._holders if holder.steps_left > start), start + 1)

    def _low_water(
        self, completions: Iterable[Completion], memory: float, joining: Joining, kept_tokens: int
    ) -> tuple[float, int]:
        """The least memory, and when, if a request joins; the first that is not positive ends the walk.

        `memory` is what is available now less its prompt; `kept_tokens` are kept back for every request.
        """
        start, end, early = joining.start, joining.start + joining.num_steps, joining.early
        memory += start - sum(holder.prompt_left for holder in self._holders)
        alive, rate = len(self._holders) + 1, 1 + sum(holder.rate for holder in self._holders)
        lowest, when = math.inf, start
        for holder, freed_tokens in completions:
            step = holder.steps_left
            if lowest == math.inf and (step > start or (step == start and early)):
                lowest = memory - rate * start - alive * kept_tokens
            if step >= end or lowest <= 0:
                break
            left = memory - rate * step - alive * kept_tokens
            if left < lowest < math.inf:
                lowest, when = left, step
                if lowest <= 0:
                    break
            memory += freed_tokens + holder.prompt_left
            alive -= 1
            rate -= holder.rate
        left = memory - rate * end - alive * kept_tokens
        return (left, end) if lowest > 0 and left < lowest else (lowest, when)


def num_freed_pages(req: Req, locks_left: dict[TreeNode, int]) -> int:
    """Pages that nobody uses once `req` has ended too, after others whose locks were taken off `locks_left` before."""
    num_pages = len(req.page_ids) - req.num_tree_pages
    node = req.last_node
    while node is not None and node.parent is not None:
        num_locks = locks_left.get(node, node.lock_ref) - 1
        if num_locks == 0:
            num_pages += len(node.page_ids)
        else:
            locks_left[node] = num_locks
        node = node.parent
    return num_pages
