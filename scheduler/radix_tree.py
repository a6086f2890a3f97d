"""The radix cache: which KV pages hold the keys and values of which token runs, so that equal prefixes are shared.

A compressed prefix tree over whole pages, after RadixAttention (Zheng et al. 2024, arXiv 2312.07104). A key is a run of
tokens as packed int32 bytes, so that runs are compared by memcmp. Below the root a namespace (adapter, cache salt) is
part of the key: equal tokens of two namespaces never share. Time is a count of accesses. What is evicted first is a
policy's choice (eviction_policy.py); who waits for what is cached is watched from outside (prefix_watch.py).
"""

from collections.abc import Hashable, Iterator
from typing import Protocol

import msgspec

from .eviction_policy import NO_PRIORITY, POLICIES, EvictionHeap

TOKEN_BYTES = 4


class TreeNode:
    """A run of whole pages under its parent. `lock_ref` counts the requests that use it or a node below it.

    A node that is evicted leaves its parent's `children`, and keeps `parent`: the way to where its prefix went on.
    """

    __slots__ = (
        "children",
        "creation",
        "edge",
        "heap_key",
        "hit_count",
        "key",
        "last_access",
        "lock_ref",
        "num_waiting",
        "page_ids",
        "parent",
        "priority",
    )

    def __init__(
        self, parent: "TreeNode | None", edge: Hashable, key: bytearray, page_ids: list[int], time: int
    ) -> None:
        self.parent = parent
        self.edge = edge  # this node's name among the parent's children
        self.key = key
        self.page_ids = page_ids
        self.children: dict[Hashable, TreeNode] = {}
        self.lock_ref = 0
        self.creation = self.last_access = time
        self.hit_count = 0
        self.priority = NO_PRIORITY
        self.heap_key: int | None = None
        self.num_waiting = 0  # requests whose match ends here or below; kept by the listener

    @property
    def is_evictable(self) -> bool:
        """Whether nobody uses it and nothing hangs below it."""
        return self.lock_ref == 0 and not self.children

    @property
    def in_heap(self) -> bool:
        """Whether eviction will come across it."""
        return self.heap_key is not None


class TreeListener(Protocol):
    """Hears of what changes the matches that end at nodes with `num_waiting`."""

    def child_added(self, node: TreeNode, edge: Hashable) -> None:
        """`node` has a new child: a match that ended at `node` goes on where its next page is `edge`."""

    def shrunk(self, node: TreeNode) -> None:
        """Pages at the end of the leaf `node`, or all of them, are gone: a match that ended there ends earlier."""


class MatchResult(msgspec.Struct, frozen=True):
    """The longest cached prefix: its pages, and the node where it ends (not locked yet)."""

    page_ids: list[int]
    last_node: TreeNode


class InsertResult(msgspec.Struct, frozen=True):
    """The first `num_present_pages` were there under other ids; the tree owns the rest now. `last_node` ends the run."""

    num_present_pages: int
    last_node: TreeNode


class RadixCache:
    """The tree, its locks and its eviction. Disabled, it matches nothing and takes nothing."""

    def __init__(self, page_size: int, *, disabled: bool = False, eviction_policy: str = "lru") -> None:
        self.page_size = page_size
        self.disabled = disabled
        self.listener: TreeListener | None = None
        self.evictable_pages = 0
        self.protected_pages = 0
        self.root = TreeNode(None, None, bytearray(), [], 0)
        self.root.lock_ref = 1
        self.page_bytes = page_size * TOKEN_BYTES
        self._policy = POLICIES[eviction_policy]
        self._time = 0
        self._heap: EvictionHeap[TreeNode] = EvictionHeap(self._policy)

    def reset(self) -> list[int]:
        """Forget everything; returns the pages that the tree owned. AssertionError if a request still uses one."""
        assert self.protected_pages == 0, "the radix tree is emptied while requests use it"
        nodes = list(self.nodes())
        self.root.children.clear()
        self.evictable_pages = 0
        self._heap = EvictionHeap(self._policy)
        for node in nodes:
            self._tell_shrunk(node)
        return [page_id for node in nodes for page_id in node.page_ids]

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match_prefix(self, namespace: Hashable, key: bytes) -> MatchResult:
        """Find the longest cached prefix of `key` (its last partial page is ignored) and mark it as just used."""
        path = [] if self.disabled else self._walk(self.root, namespace, key)
        page_ids: list[int] = []
        for node in path:
            page_ids += node.page_ids
        return MatchResult(page_ids, path[-1] if path else self.root)

    def has_next_page(self, node: TreeNode, namespace: Hashable, key: bytes) -> bool:
        """Whether the first page of `key` is cached right below `node`."""
        return self.edge(node, namespace, key) in node.children

    def edge(self, node: TreeNode, namespace: Hashable, key: bytes, start: int = 0) -> Hashable:
        """The name of the child of `node` that begins with the page at byte `start` of `key`."""
        page = key[start : start + self.page_bytes]
        return (namespace, page) if node.parent is None else page

    def append(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> TreeNode:
        """Add new pages below `node`, on which the caller holds a lock; the lock moves to the returned node.

        The first page must not be cached there yet (`has_next_page`). A leaf that only the caller uses, and where no
        waiting request's match ends, grows in place, so a long output does not become a long chain.
        """
        self._time += 1
        self.protected_pages += len(page_ids)
        if node.lock_ref == 1 and not node.children and not node.num_waiting and node is not self.root:
            node.key += key
            node.page_ids += page_ids
            node.last_access = self._time
            return node
        child = self._add_child(node, namespace, key, page_ids)
        child.lock_ref = 1
        return child

    def insert(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> InsertResult:
        """Add the run `key` (whole pages) below `node` where it is not cached yet, unlocked."""
        path = self._walk(node, namespace, key)
        num_present = sum(len(present.page_ids) for present in path)
        node = path[-1] if path else node
        if num_present < len(page_ids):
            node = self._add_child(node, namespace, key[num_present * self.page_bytes :], page_ids[num_present:])
            self.evictable_pages += len(node.page_ids)
            self._heap.push(node)
        return InsertResult(num_present, node)

    def inc_hit_count(self, node: TreeNode, priority: int) -> None:
        """A request of this priority is done with the run that ends at `node`."""
        while node.parent is not None:
            node.hit_count += 1
            node.priority = max(node.priority, priority)
            node = node.parent

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Keep `node` and all above it from eviction."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_pages -= len(node.page_ids)
                self.protected_pages += len(node.page_ids)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undo one `inc_lock_ref`; all of the path counts as used until now."""
        self._time += 1
        while node.parent is not None:
            assert node.lock_ref > 0, "a radix tree node is unlocked more often than it was locked"
            node.lock_ref -= 1
            node.last_access = self._time
            if node.lock_ref == 0:
                self.evictable_pages += len(node.page_ids)
                self.protected_pages -= len(node.page_ids)
                self._heap.push(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        """Give up `num_pages` pages, or all that are evictable: runs in the policy's order, each from its end.

        O(log n) a run (EvictionHeap).
        """
        evicted: list[int] = []
        while len(evicted) < num_pages and (node := self._heap.pop()) is not None:
            evicted += self._cut(node, num_pages - len(evicted))
        self.evictable_pages -= len(evicted)
        return evicted

    def _cut(self, node: TreeNode, num_pages: int) -> list[int]:
        """Take up to `num_pages` pages of an unlocked leaf, its last one first; a leaf left empty is removed."""
        taken = node.page_ids[: -num_pages - 1 : -1]
        if len(taken) < len(node.page_ids):
            del node.page_ids[-num_pages:]
            del node.key[-num_pages * self.page_bytes :]
            self._heap.push(node)
        else:
            assert node.parent is not None
            del node.parent.children[node.edge]
            self._heap.push(node.parent)
        self._tell_shrunk(node)
        return taken

    def _tell_shrunk(self, node: TreeNode) -> None:
        if node.num_waiting and self.listener is not None:
            self.listener.shrunk(node)

    def _add_child(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> TreeNode:
        edge = self.edge(node, namespace, key)
        child = node.children[edge] = TreeNode(node, edge, bytearray(key), list(page_ids), self._time)
        if node.num_waiting and self.listener is not None:
            self.listener.child_added(node, edge)
        return child

    def _walk(self, node: TreeNode, namespace: Hashable, key: bytes) -> list[TreeNode]:
        """The nodes below `node` that hold the whole pages `key` begins with, marked as just used.

        Where `key` ends or goes another way inside a node, the node is split, so that the last one ends there.
        """
        self._time += 1
        path: list[TreeNode] = []
        start, last_start = 0, len(key) - self.page_bytes
        while start <= last_start:
            child = node.children.get(self.edge(node, namespace, key, start))
            if child is None:
                break
            if not key.startswith(child.key, start):
                child = self._split(child, self._num_equal_pages(child.key, key, start))
            child.last_access = self._time
            path.append(child)
            start += len(child.key)
            node = child
        if path:
            self._heap.push(node)  # used, it may come up earlier than before (mru)
        return path

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cut `node` after `num_pages`; returns the new upper part. `node` stays the end of its run, as requests know it."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self.page_bytes
        upper = TreeNode(parent, node.edge, node.key[:cut], node.page_ids[:num_pages], node.creation)
        upper.lock_ref, upper.num_waiting = node.lock_ref, node.num_waiting
        upper.last_access, upper.hit_count, upper.priority = node.last_access, node.hit_count, node.priority
        parent.children[node.edge] = upper
        del node.key[:cut]
        del node.page_ids[:num_pages]
        node.parent, node.edge = upper, bytes(node.key[: self.page_bytes])
        upper.children[node.edge] = node
        return upper

    def _num_equal_pages(self, run: bytearray, key: bytes, start: int) -> int:
        """Whole pages that `run` and `key` from `start` have in common: at least the first, and not all of `run`."""
        page_bytes = self.page_bytes
        equal, differs = 1, min(len(run), len(key) - start) // page_bytes + 1
        with memoryview(run) as view:
            while differs - equal > 1:
                middle = (equal + differs) // 2
                if key.startswith(view[equal * page_bytes : middle * page_bytes], start + equal * page_bytes):
                    equal = middle
                else:
                    differs = middle
        return equal
