"""How much of each waiting request is cached, kept up to date by what changes in the tree and not by looking again.

A request waits at the node where its match ends, in the bucket of its next page. A new child of that node concerns the
bucket of that page alone; pages that go from the end of a node concern those that wait at it. Either way whole buckets
are set aside at once, and `refresh` looks their requests up again, so many a call. Everything else costs nothing.
"""

from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import NamedTuple

from .radix_tree import RadixCache, TreeNode
from .req import Req

Bucket = dict[Req, None]  # an ordered set


class _Place(NamedTuple):
    """Where a request waits: at the end of `node`; `edge` names the child that would hold its next page, if it has one."""

    node: TreeNode
    edge: Hashable
    bucket: Bucket


class PrefixWatch:
    """The listener of the tree. It locks nothing: what a waiting request has matched may be evicted, and it hears of it."""

    def __init__(self, tree_cache: RadixCache) -> None:
        assert tree_cache.listener is None, "a radix tree has one watch"
        tree_cache.listener = self
        self._tree = tree_cache
        self._places: dict[Req, _Place] = {}
        self._buckets: dict[TreeNode, dict[Hashable, Bucket]] = {}  # of nodes where nothing has changed
        self._changed: deque[Bucket] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, req: Req) -> None:
        """Look `req` up (as far as it may be cached), set its `matched_len`, and watch the place."""
        tree = self._tree
        key = req.key(0, req.max_cached_len)
        match = tree.match_prefix(req.namespace, key)
        node, page_size = match.last_node, tree.page_size
        req.matched_len = len(match.page_ids) * page_size
        has_next_page = req.matched_len + page_size <= req.max_cached_len
        edge = tree.edge(node, req.namespace, key, len(match.page_ids) * tree.page_bytes) if has_next_page else None
        bucket = self._buckets.setdefault(node, {}).setdefault(edge, {})
        bucket[req] = None
        self._places[req] = _Place(node, edge, bucket)
        _count(node, 1)

    def remove(self, req: Req) -> None:
        """`req` waits no longer; KeyError if it did not."""
        node, edge, bucket = self._places.pop(req)
        del bucket[req]
        _count(node, -1)
        buckets = self._buckets.get(node, {})
        if not bucket and buckets.get(edge) is bucket:
            del buckets[edge]
            if not buckets:
                del self._buckets[node]

    def refresh(self, max_reqs: int = 16) -> list[Req]:
        """Look up again at most `max_reqs` of those whose match has changed.

        Returns those whose `matched_len` or `node_of` is new: a prefix that was evicted and is back may be another node.
        What they match counts as just used, as in `add`: it is wanted soon.
        """
        renewed = []
        for req in self._take_changed(max_reqs):
            before = (req.matched_len, self.node_of(req))
            self.remove(req)
            self.add(req)
            if (req.matched_len, self.node_of(req)) != before:
                renewed.append(req)
        return renewed

    def num_waiting(self, node: TreeNode) -> int:
        """Requests whose match ends at `node` or below it."""
        return node.num_waiting

    def node_of(self, req: Req) -> TreeNode:
        """Where the match of `req` ended when it was last looked up; KeyError if it does not wait."""
        return self._places[req].node

    def child_added(self, node: TreeNode, edge: Hashable) -> None:
        """The matches of those whose next page is `edge` go on."""
        buckets = self._buckets.get(node, {})
        bucket = buckets.pop(edge, None)
        if bucket is not None:
            self._changed.append(bucket)
            if not buckets:
                del self._buckets[node]

    def shrunk(self, node: TreeNode) -> None:
        """The matches that ended at `node` end earlier."""
        self._changed.extend(self._buckets.pop(node, {}).values())

    def _take_changed(self, max_reqs: int) -> list[Req]:
        """The first requests of the changed buckets; each is to be removed before the next call."""
        reqs: list[Req] = []
        while self._changed and len(reqs) < max_reqs:
            reqs += islice(self._changed[0], max_reqs - len(reqs))
            if len(reqs) < max_reqs:
                self._changed.popleft()
        return reqs


def _count(node: TreeNode | None, change: int) -> None:
    while node is not None:
        node.num_waiting += change
        node = node.parent
