"""Memory over the coming steps, if nobody else is admitted: who holds pages, until when, and what comes back then.

Lifetimes are estimates: a request ends when its max_new_tokens are reached, at the latest, and takes `rate` tokens a
step until then: 1 where only its length ends it (ignore_eos), else the share that new_token_ratio expects of it.
Memory is counted in tokens (KV slots).
"""

import bisect
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from .page_pool import PagePool
from .radix_tree import TreeNode
from .req import Req


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


class MemoryForecast:
    """The holders in the order in which they end."""

    def __init__(self, pool: PagePool, holders: Iterable[Holder]) -> None:
        self._pool = pool
        self._holders = sorted(holders, key=attrgetter("steps_left"))

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
        kept back, for what its last page wastes. Ends early, with what it has, once that is not positive. Where the
        candidate is cached, its prefix has to be locked.
        """
        page_size = self._pool.page_size
        memory: float = self._pool.num_available_pages * page_size - num_tokens
        memory -= sum(holder.prompt_left for holder in self._holders)
        alive, rate = len(self._holders) + 1, 1 + sum(holder.rate for holder in self._holders)
        lowest = memory - alive * page_size
        for holder, freed_tokens in self.completions():
            if holder.steps_left >= num_steps:
                break
            lowest = min(lowest, memory - rate * holder.steps_left - alive * page_size)
            if lowest <= 0:
                return lowest
            memory += freed_tokens + holder.prompt_left
            alive -= 1
            rate -= holder.rate
        return min(lowest, memory - rate * num_steps - alive * page_size)


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
