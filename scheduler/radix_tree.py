"""The radix cache: which KV pages hold the keys and values of which token runs, so that equal prefixes are shared.

A compressed prefix tree over whole pages, after RadixAttention (Zheng et al. 2024, arXiv 2312.07104). A key is a run of
tokens as packed int32 bytes, so that runs are compared by memcmp. Below the root a namespace (adapter, cache salt) is
part of the key: equal tokens of two namespaces never share. Time is a count of accesses.
"""

import heapq
from collections.abc import Hashable, Iterator

import msgspec

TOKEN_BYTES = 4


class TreeNode:
    """A run of whole pages under its parent. `lock_ref` counts the requests that use it or a node below it."""

    __slots__ = ("children", "edge", "in_heap", "key", "last_access", "lock_ref", "page_ids", "parent")

    def __init__(self, parent: "TreeNode | None", edge: Hashable, key: bytearray, page_ids: list[int]) -> None:
        self.parent = parent
        self.edge = edge  # this node's name among the parent's children
        self.key = key
        self.page_ids = page_ids
        self.children: dict[Hashable, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.in_heap = False


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

    def __init__(self, page_size: int, *, disabled: bool = False) -> None:
        self.page_size = page_size
        self.disabled = disabled
        self._page_bytes = page_size * TOKEN_BYTES
        self.reset()

    def reset(self) -> list[int]:
        """Forget everything (nothing may be locked); returns the pages that the tree owned."""
        page_ids = [page_id for node in self.nodes() for page_id in node.page_ids] if hasattr(self, "root") else []
        self.root = TreeNode(None, None, bytearray(), [])
        self.root.lock_ref = 1
        self.evictable_pages = 0
        self.protected_pages = 0
        self._time = 0
        self._heap: list[tuple[int, int, TreeNode]] = []  # (last access when pushed, tie breaker, node)
        self._num_pushed = 0
        return page_ids

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def match_prefix(self, namespace: Hashable, key: bytes) -> MatchResult:
        """Find the longest cached prefix of `key` (its last partial page is ignored) and mark it as just used."""
        self._time += 1
        node, matched, page_ids = self.root, 0, []
        length = 0 if self.disabled else len(key) - len(key) % self._page_bytes
        while matched < length:
            child = node.children.get(self._edge(node, namespace, key, matched))
            if child is None:
                break
            num_pages = self._num_equal_pages(child.key, key, matched, length)
            if num_pages < len(child.page_ids):
                child = self._split(child, num_pages)
            child.last_access = self._time
            page_ids += child.page_ids
            matched += num_pages * self._page_bytes
            node = child
        return MatchResult(page_ids, node)

    def has_next_page(self, node: TreeNode, namespace: Hashable, key: bytes) -> bool:
        """Whether the first page of `key` is cached right below `node`."""
        return self._edge(node, namespace, key, 0) in node.children

    def append(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> TreeNode:
        """Add new pages below `node`, on which the caller holds a lock; the lock moves to the returned node.

        The first page must not be cached there yet (`has_next_page`). A leaf that only the caller uses grows in place,
        so a long output does not become a long chain.
        """
        self._time += 1
        self.protected_pages += len(page_ids)
        if node.lock_ref == 1 and not node.children and node is not self.root:
            node.key += key
            node.page_ids += page_ids
            node.last_access = self._time
            return node
        child = self._add_child(node, namespace, key, page_ids)
        child.lock_ref = 1
        return child

    def insert(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> InsertResult:
        """Add the run `key` (whole pages) below `node` where it is not cached yet, unlocked."""
        self._time += 1
        present = 0
        while present < len(page_ids):
            start = present * self._page_bytes
            child = node.children.get(self._edge(node, namespace, key, start))
            if child is None:
                break
            num_pages = self._num_equal_pages(child.key, key, start, len(key))
            if num_pages < len(child.page_ids):
                child = self._split(child, num_pages)
            child.last_access = self._time
            present += num_pages
            node = child
        if present < len(page_ids):
            node = self._add_child(node, namespace, key[present * self._page_bytes :], page_ids[present:])
            self.evictable_pages += len(node.page_ids)
            self._push_if_evictable(node)
        return InsertResult(present, node)

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
                self._push_if_evictable(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        """Give up at least `num_pages` pages, if that many are evictable: least recently used runs, from their ends.

        O(log n) a run: every evictable leaf has one entry in a heap, corrected when it comes up.
        """
        evicted: list[int] = []
        while len(evicted) < num_pages and self._heap:
            pushed_access, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.lock_ref or node.children or node.parent is None:
                continue  # it will be pushed again when it is an evictable leaf
            if node.last_access != pushed_access:
                self._push_if_evictable(node)
                continue
            evicted += self._cut(node, num_pages - len(evicted))
        self.evictable_pages -= len(evicted)
        return evicted

    def _cut(self, node: TreeNode, num_pages: int) -> list[int]:
        """Take up to `num_pages` pages of an unlocked leaf, its last one first; a leaf left empty is removed."""
        taken = node.page_ids[: -num_pages - 1 : -1]
        if len(taken) < len(node.page_ids):
            del node.page_ids[-num_pages:]
            del node.key[-num_pages * self._page_bytes :]
            self._push_if_evictable(node)
            return taken
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        node.parent = None
        self._push_if_evictable(parent)
        return taken

    def _push_if_evictable(self, node: TreeNode) -> None:
        if node.lock_ref or node.children or node.in_heap:
            return
        node.in_heap = True
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_access, self._num_pushed, node))

    def _add_child(self, node: TreeNode, namespace: Hashable, key: bytes, page_ids: list[int]) -> TreeNode:
        child = TreeNode(node, self._edge(node, namespace, key, 0), bytearray(key), list(page_ids))
        child.last_access = self._time
        node.children[child.edge] = child
        return child

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cut `node` after `num_pages`; returns the new upper part. `node` stays the end of its run, as requests know it."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self._page_bytes
        upper = TreeNode(parent, node.edge, node.key[:cut], node.page_ids[:num_pages])
        upper.lock_ref, upper.last_access = node.lock_ref, node.last_access
        parent.children[node.edge] = upper
        del node.key[:cut]
        del node.page_ids[:num_pages]
        node.parent, node.edge = upper, bytes(node.key[: self._page_bytes])
        upper.children[node.edge] = node
        return upper

    def _edge(self, node: TreeNode, namespace: Hashable, key: bytes, start: int) -> Hashable:
        """The name of the child that begins with the page at byte `start` of `key`."""
        page = key[start : start + self._page_bytes]
        return (namespace, page) if node.parent is None else page

    def _num_equal_pages(self, run: bytearray, key: bytes, start: int, end: int) -> int:
        """How many pages `run` and `key[start:end]` begin with in common; the first page is known to be equal."""
        size = min(len(run), end - start)
        if run[:size] == key[start : start + size]:
            return size // self._page_bytes
        equal, differs = 1, size // self._page_bytes
        while differs - equal > 1:
            middle = (equal + differs) // 2
            low, high = equal * self._page_bytes, middle * self._page_bytes
            if run[low:high] == key[start + low : start + high]:
                equal = middle
            else:
                differs = middle
        return equal
