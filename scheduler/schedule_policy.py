"""Scheduling policies: pure orders of the waiting requests, as SGLang's `--schedule-policy` names them.

    fcfs         first come, first served
    lof          longest output (max_new_tokens) first
    random       shuffled once per request, from the server's seed
    routing-key  those whose routing_key the most running requests have
    lpm          longest prefix match first: what is cached is used before it is evicted
    dfs-weight   depth first through the radix tree, into the subtree where the most requests wait

Over fcfs and lof, `--enable-priority-scheduling` puts `Req.priority` first. A request that ran before (retracted or
preempted) keeps its arrival and goes ahead of its equals. With the radix cache off, lpm and dfs-weight are fcfs.
Ageing, which bounds what an order can do to a request, is the queue's (waiting_queue.py).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from heapq import merge
from itertools import groupby
from typing import Any, Protocol

from ..common.config import CACHE_AWARE_POLICIES
from .prefix_watch import PrefixWatch
from .radix_tree import RadixCache, TreeNode
from .req import Req
from .scheduler_config import SchedulerConfig
from .sorted_reqs import SortedReqs

CHEAP_WALK = 256  # children that dfs-weight looks at in every step without a second thought
MAX_REUSES = 16  # steps for which it uses a longer walk again

Key = Callable[[Req], Any]


def by_arrival(req: Req) -> Any:
    """First come, first served; of those that came at one time, those that ran before."""
    return (req.arrival, req.num_retractions == 0)


def by_longest_output(req: Req) -> Any:
    """The longest outputs first, so that they do not run alone at the end."""
    return (-req.max_new_tokens, req.num_retractions == 0, req.arrival)


def by_longest_match(req: Req) -> Any:
    """The most cached tokens first."""
    return (-req.matched_len, req.num_retractions == 0, req.arrival)


def by_priority(key: Key) -> Key:
    """The most urgent first, then as `key` says."""
    return lambda req: (-req.priority, key(req))


def by_random(seed: int) -> Key:
    """A number drawn once for each request: the same seed and rid give the same one."""
    salt = seed.to_bytes(8, "little", signed=True)
    return lambda req: hashlib.blake2b(req.rid.encode(), digest_size=8, salt=salt).digest()


class Policy(Protocol):
    """An order of the waiting requests, kept while they come and go."""

    def add(self, req: Req) -> None:
        """It waits."""

    def remove(self, req: Req) -> None:
        """It waits no more."""

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """All that wait, the first to be admitted first; lazily, over what must not change meanwhile."""
        ...


def make_policy(config: SchedulerConfig, tree_cache: RadixCache, reqs_by_arrival: SortedReqs) -> Policy:
    """The policy that the flags ask for. `reqs_by_arrival` is kept by the queue."""
    name = config.schedule_policy
    if tree_cache.disabled and name in CACHE_AWARE_POLICIES:
        name = "fcfs"
    match name:
        case "lof":
            return StaticOrder(
                by_priority(by_longest_output) if config.enable_priority_scheduling else by_longest_output
            )
        case "random":
            return StaticOrder(by_random(config.random_seed))
        case "routing-key":
            return RoutingKeyOrder(reqs_by_arrival)
        case "lpm":
            return LongestPrefixOrder(PrefixWatch(tree_cache))
        case "dfs-weight":
            return DepthFirstOrder(tree_cache.root, PrefixWatch(tree_cache), reqs_by_arrival)
        case _:
            return (
                StaticOrder(by_priority(by_arrival))
                if config.enable_priority_scheduling
                else ArrivalOrder(reqs_by_arrival)
            )


class ArrivalOrder:
    """fcfs: the order that the queue has anyway."""

    def __init__(self, reqs_by_arrival: SortedReqs) -> None:
        self._reqs = reqs_by_arrival

    def add(self, req: Req) -> None:
        """The queue does it."""

    def remove(self, req: Req) -> None:
        """The queue does it."""

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """By arrival."""
        return iter(self._reqs)


class StaticOrder:
    """By a key that does not change while a request waits."""

    def __init__(self, key: Key) -> None:
        self._reqs = SortedReqs(key)

    def add(self, req: Req) -> None:
        """Sort it in."""
        self._reqs.add(req)

    def remove(self, req: Req) -> None:
        """Take it out."""
        self._reqs.remove(req)

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """By the key."""
        return iter(self._reqs)


class LongestPrefixOrder:
    """lpm: a request's key changes only when the tree changes below its match, so a long queue costs no more."""

    def __init__(self, watch: PrefixWatch) -> None:
        self._watch = watch
        self._reqs = SortedReqs(by_longest_match)

    def add(self, req: Req) -> None:
        """Look it up, and sort it in."""
        self._watch.add(req)
        self._reqs.add(req)

    def remove(self, req: Req) -> None:
        """Take it out."""
        self._watch.remove(req)
        self._reqs.remove(req)

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """By the length of the cached prefix."""
        for req in self._watch.refresh():
            self._reqs.remove(req)
            self._reqs.add(req)
        return iter(self._reqs)


class RoutingKeyOrder:
    """routing-key: requests of one tenant run together. Those without a key, or with a new one, go by arrival."""

    def __init__(self, reqs_by_arrival: SortedReqs) -> None:
        self._all = reqs_by_arrival
        self._groups: dict[str, SortedReqs] = {}

    def add(self, req: Req) -> None:
        """Join the others of its key."""
        key = req.message.routing_key
        if key is not None:
            if key not in self._groups:
                self._groups[key] = SortedReqs(by_arrival)
            self._groups[key].add(req)

    def remove(self, req: Req) -> None:
        """Leave them."""
        key = req.message.routing_key
        if key is not None:
            self._groups[key].remove(req)
            if not len(self._groups[key]):
                del self._groups[key]

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """The key with the most running requests first; keys with equally many by arrival, as if they were one."""
        counts = Counter(req.message.routing_key for req in running)
        present = [(-num_running, key) for key, num_running in counts.items() if key in self._groups]
        for _, keys in groupby(sorted(present), key=lambda pair: pair[0]):
            yield from merge(*(self._groups[key] for _, key in keys if key is not None), key=by_arrival)
        for req in self._all:
            if req.message.routing_key is None or req.message.routing_key not in counts:
                yield req


class DepthFirstOrder:
    """dfs-weight: all that hang below one prefix one after another, so that a branch is used up before it is evicted.

    A walk looks at all children of the nodes on its way; a long one is used again for MAX_REUSES steps, as far as it
    went, and goes on from there. Who is not on it yet comes last meanwhile.
    """

    def __init__(self, root: TreeNode, watch: PrefixWatch, reqs_by_arrival: SortedReqs) -> None:
        self._root = root
        self._watch = watch
        self._all = reqs_by_arrival
        self._node_of: dict[Req, TreeNode] = {}
        self._reqs_at: dict[TreeNode, SortedReqs] = {}
        self._walk: Iterator[TreeNode] = iter(())
        self._walked: list[TreeNode] = []
        self._num_looked_at = 0  # children, in this walk
        self._num_reuses = 0

    def add(self, req: Req) -> None:
        """Look it up, and sort it in at the end of its match."""
        self._watch.add(req)
        self._place(req)

    def remove(self, req: Req) -> None:
        """Take it out."""
        self._watch.remove(req)
        self._displace(req)

    def order(self, running: Collection[Req]) -> Iterator[Req]:
        """Children before their parent, those with more waiting requests first; at one node by arrival.

        Requests whose node was evicted and not looked up again yet come last.
        """
        for req in self._watch.refresh():
            self._displace(req)
            self._place(req)
        seen: set[Req] = set()
        for node in self._nodes():
            for req in self._reqs_at.get(node, ()):
                if req not in seen:
                    seen.add(req)
                    yield req
        if len(seen) < len(self._all):
            yield from (req for req in self._all if req not in seen)

    def _nodes(self) -> Iterator[TreeNode]:
        """The walk of the last steps, if it was long, and what follows; else a new one."""
        self._num_reuses += 1
        if self._num_looked_at <= CHEAP_WALK or self._num_reuses > MAX_REUSES:
            self._walk, self._walked = self._depth_first(), []
            self._num_looked_at = self._num_reuses = 0
        yield from self._walked
        for node in self._walk:
            self._walked.append(node)
            yield node

    def _depth_first(self) -> Iterator[TreeNode]:
        """Without recursion: a tree may be deep."""
        stack: list[tuple[TreeNode, bool]] = [(self._root, False)]
        while stack:
            node, is_below_done = stack.pop()
            if is_below_done:
                yield node
                continue
            stack.append((node, True))
            self._num_looked_at += len(node.children)
            waiting = [child for child in node.children.values() if self._watch.num_waiting(child)]
            waiting.sort(key=self._watch.num_waiting)
            stack += [(child, False) for child in waiting]

    def _place(self, req: Req) -> None:
        node = self._node_of[req] = self._watch.node_of(req)
        if node not in self._reqs_at:
            self._reqs_at[node] = SortedReqs(by_arrival)
        self._reqs_at[node].add(req)

    def _displace(self, req: Req) -> None:
        node = self._node_of.pop(req)
        self._reqs_at[node].remove(req)
        if not len(self._reqs_at[node]):
            del self._reqs_at[node]
