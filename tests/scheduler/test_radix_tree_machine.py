"""The radix tree and its watch against a dictionary of prefixes, whatever is done to them in whatever order."""

import itertools
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.common.config import EVICTION_POLICIES
from millstream.common.messages import TokenizedGenerateReqInput
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.eviction_policy import NO_PRIORITY, NUMBER_BITS
from millstream.scheduler.prefix_watch import PrefixWatch
from millstream.scheduler.radix_tree import RadixCache, TreeNode
from millstream.scheduler.req import Req
from tests.scheduler.prefix_model import CachedPage, DictionaryOfPrefixes, PageText, Prefix

Namespace = tuple[str | None, str | None]
namespaces = st.sampled_from([(None, None), (None, "salt"), ("adapter", None)])
texts = st.lists(st.integers(0, 2), max_size=6).map(tuple)
choices = st.integers(0, 99)


def waiting_req(namespace: Namespace, token_ids: "array[int]") -> Req:
    message = TokenizedGenerateReqInput(
        rid="",
        frontend="",
        arrival=0.0,
        input_ids=token_ids.tobytes(),
        sampling_params=SamplingParams(),
        lora_id=namespace[0],
        cache_salt=namespace[1],
    )
    return Req(message, token_ids, 1)


def assert_same_order(pairs: Iterable[tuple[int, int]]) -> None:
    """Both of each pair are counts, one of the tree and one of the model; they order the pairs alike."""
    one_to_one = set(pairs)
    firsts, seconds = sorted(first for first, _ in one_to_one), sorted(second for _, second in one_to_one)
    assert sorted(one_to_one) == list(zip(firsts, seconds, strict=True))
    assert len(set(firsts)) == len(set(seconds)) == len(one_to_one)


@dataclass
class Running:
    """A request with a lock: its first `num_tree_pages` letters are in the tree, ending at `node`."""

    namespace: Namespace
    letters: tuple[int, ...]
    page_ids: list[int]
    num_tree_pages: int
    node: TreeNode
    locked: list[CachedPage] = field(default_factory=list)


class RadixTreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 16, 64]), policy=st.sampled_from(EVICTION_POLICIES))
    def start_empty(self, page_size: int, policy: str) -> None:
        self.text = PageText(page_size)
        self.tree = RadixCache(page_size, eviction_policy=policy)
        self.watch = PrefixWatch(self.tree)
        self.model = DictionaryOfPrefixes(policy)
        self.fresh = itertools.count()
        self.running: list[Running] = []
        self.waiting: list[Req] = []

    def fresh_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self.fresh, count))

    @rule(namespace=namespaces, letters=texts, num_more_tokens=st.integers(0, 63))
    def match(self, namespace: Hashable, letters: tuple[int, ...], num_more_tokens: int) -> None:
        part_of_a_page = self.text.key([0])[: 4 * (num_more_tokens % self.text.page_size)]
        match = self.tree.match_prefix(namespace, self.text.key(letters) + part_of_a_page)
        pages = self.model.cached(namespace, letters)
        assert match.page_ids == [page.page_id for page in pages]
        self.model.touch(pages)

    @rule(namespace=namespaces, letters=texts)
    def insert(self, namespace: Hashable, letters: tuple[int, ...]) -> None:
        page_ids = self.fresh_ids(len(letters))
        result = self.tree.insert(self.tree.root, namespace, self.text.key(letters), page_ids)
        assert result.num_present_pages == len(self.model.cached(namespace, letters))
        self.model.add(namespace, letters, 0, page_ids)

    @rule(namespace=namespaces, letters=texts)
    def start(self, namespace: Namespace, letters: tuple[int, ...]) -> None:
        match = self.tree.match_prefix(namespace, self.text.key(letters))
        self.tree.inc_lock_ref(match.last_node)
        pages = self.model.cached(namespace, letters)
        self.model.touch(pages)
        for page in pages:
            page.locks += 1
        page_ids = match.page_ids + self.fresh_ids(len(letters) - len(pages))
        self.running.append(Running(namespace, letters, page_ids, len(pages), match.last_node, pages))

    @precondition(lambda self: self.running)
    @rule(which=choices, letters=texts)
    def grow(self, which: int, letters: tuple[int, ...]) -> None:
        request = self.running[which % len(self.running)]
        request.letters += letters
        request.page_ids += self.fresh_ids(len(letters))

    @precondition(lambda self: self.running)
    @rule(which=choices)
    def cache_unfinished(self, which: int) -> None:
        request = self.running[which % len(self.running)]
        start = request.num_tree_pages
        key, page_ids = self.text.key(request.letters[start:]), request.page_ids[start:]
        if not page_ids:
            return
        is_cached = (request.namespace, request.letters[: start + 1]) in self.model.pages
        assert self.tree.has_next_page(request.node, request.namespace, key) == is_cached
        if is_cached:
            return
        node = self.tree.append(request.node, request.namespace, key, page_ids)
        new = self.model.add(request.namespace, request.letters, start, page_ids)
        for page in new:
            page.locks = 1
            if node is request.node:  # it grew, so they are of one run with the page before them
                before = request.locked[-1]
                page.creation, page.hits, page.priority = before.creation, before.hits, before.priority
        request.node, request.num_tree_pages = node, len(request.letters)
        request.locked += new

    @precondition(lambda self: self.running)
    @rule(which=choices, priority=st.integers(-2, 2))
    def finish(self, which: int, priority: int) -> None:
        request = self.running.pop(which % len(self.running))
        start = request.num_tree_pages
        key, page_ids = self.text.key(request.letters[start:]), request.page_ids[start:]
        num_cached = len(self.model.cached(request.namespace, request.letters))
        result = self.tree.insert(request.node, request.namespace, key, page_ids)
        assert result.num_present_pages == num_cached - start
        self.model.add(request.namespace, request.letters, start, page_ids)
        self.tree.inc_hit_count(result.last_node, priority)
        for page in self.model.cached(request.namespace, request.letters):
            page.hits += 1
            page.priority = max(page.priority, priority)
        self.unlock(request)

    @precondition(lambda self: self.running)
    @rule(which=choices)
    def give_up(self, which: int) -> None:
        self.unlock(self.running.pop(which % len(self.running)))

    def unlock(self, request: Running) -> None:
        self.tree.dec_lock_ref(request.node)
        self.model.touch(request.locked)
        for page in request.locked:
            page.locks -= 1

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.tree.evictable_pages
        evicted = self.tree.evict(num_pages)
        assert len(evicted) == min(num_pages, num_evictable)
        self.model.evict(evicted)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        assert sorted(self.tree.reset()) == sorted(page.page_id for page in self.model.pages.values())
        self.model.pages.clear()

    @rule(namespace=namespaces, letters=texts, num_more_tokens=st.integers(0, 63))
    def wait(self, namespace: Namespace, letters: tuple[int, ...], num_more_tokens: int) -> None:
        num_more = num_more_tokens % self.text.page_size if letters else 1 + num_more_tokens % self.text.page_size
        req = waiting_req(namespace, self.text.tokens([*letters, 0])[: len(letters) * self.text.page_size + num_more])
        self.watch.add(req)
        assert req.matched_len == self.matched_len(req)
        self.model.touch(self.model.cached(namespace, self.matchable(req)))
        self.waiting.append(req)

    @precondition(lambda self: self.running)
    @rule(which=choices, letters=texts)
    def wait_behind(self, which: int, letters: tuple[int, ...]) -> None:
        """With the tokens of a running request, and more: an output that grows, or is evicted, concerns it."""
        request = self.running[which % len(self.running)]
        self.wait(request.namespace, request.letters + letters, 1)

    @precondition(lambda self: self.waiting)
    @rule(which=choices)
    def stop_waiting(self, which: int) -> None:
        self.watch.remove(self.waiting.pop(which % len(self.waiting)))

    @rule(max_reqs=st.sampled_from([1, 2, 100]))
    def refresh(self, max_reqs: int) -> None:
        changed = [req for bucket in self.watch._changed for req in bucket][:max_reqs]
        before = {req: (req.matched_len, self.watch.node_of(req)) for req in changed}
        renewed = self.watch.refresh(max_reqs)
        for req in changed:
            assert req.matched_len == self.matched_len(req)
            self.model.touch(self.model.cached(req.namespace, self.matchable(req)))
        assert renewed == [req for req in changed if (req.matched_len, self.watch.node_of(req)) != before[req]]

    def matchable(self, req: Req) -> tuple[int, ...]:
        """Letters of the whole pages before the last token."""
        num_pages = (len(req.token_ids) - 1) // self.text.page_size
        return self.text.letters_of(req.key(0, num_pages * self.text.page_size))

    def matched_len(self, req: Req) -> int:
        return len(self.model.cached(req.namespace, self.matchable(req))) * self.text.page_size

    @invariant()
    def the_tree_holds_what_the_dictionary_holds(self) -> None:
        nodes = self.nodes_by_prefix()
        assert nodes.keys() == self.model.pages.keys()
        sizes = Counter({True: 0, False: 0})
        page_ids: dict[TreeNode, list[int]] = {}
        for prefix, node in nodes.items():
            page = self.model.pages[prefix]
            assert (node.lock_ref, node.hit_count) == (page.locks, page.hits)
            assert node.priority == (NO_PRIORITY if page.priority == float("-inf") else page.priority)
            sizes[page.locks > 0] += 1
            page_ids.setdefault(node, []).append(page.page_id)
        assert page_ids == {node: node.page_ids for node in self.tree.nodes()}
        assert (self.tree.evictable_pages, self.tree.protected_pages) == (sizes[False], sizes[True])
        assert self.tree.root.lock_ref == 1

    @invariant()
    def times_are_in_the_order_of_what_happened(self) -> None:
        pages = [(node, self.model.pages[prefix]) for prefix, node in self.nodes_by_prefix().items()]
        assert_same_order((node.creation, page.creation) for node, page in pages)
        assert_same_order((node.last_access, page.used) for node, page in pages if node.lock_ref == 0)

    @invariant()
    def every_evictable_run_comes_up_in_time(self) -> None:
        heap = self.tree._heap
        assert len(heap._entries) <= 2 * len(heap._runs)
        assert {run.heap_key for run in heap._runs.values()} <= set(heap._entries)
        for node in self.tree.nodes():
            assert node.in_heap == (node in heap._runs.values())
            if node.is_evictable:
                assert node.heap_key is not None
                assert node.heap_key >> NUMBER_BITS <= self.tree._policy(node)

    def nodes_by_prefix(self) -> dict[Prefix, TreeNode]:
        """Every cached prefix and its node, read from the tree from above; checks how nodes hang together."""
        found: dict[Prefix, TreeNode] = {}
        paths: dict[TreeNode, tuple[int, ...]] = {self.tree.root: ()}
        for node in self.tree.nodes():
            assert node.parent is not None
            assert node.parent.children[node.edge] is node
            namespace, letters, above = self.namespace_of(node), self.text.letters_of(node.key), paths[node.parent]
            assert len(letters) == len(node.page_ids) > 0
            paths[node] = above + letters
            found |= {(namespace, above + letters[:end]): node for end in range(1, len(letters) + 1)}
        return found

    @staticmethod
    def namespace_of(node: TreeNode) -> Hashable:
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        assert isinstance(node.edge, tuple)
        namespace: Hashable = node.edge[0]
        return namespace

    @invariant()
    def a_waiting_request_is_up_to_date_or_set_aside(self) -> None:
        changed = {req for bucket in self.watch._changed for req in bucket}
        for req in self.waiting:
            assert req in changed or req.matched_len == self.matched_len(req)

    @invariant()
    def waiting_requests_are_counted_at_every_node_above_them(self) -> None:
        counts: Counter[TreeNode] = Counter()
        for req in self.waiting:
            node: TreeNode | None = self.watch.node_of(req)
            while node is not None:
                counts[node] += 1
                node = node.parent
        assert all(node.num_waiting == counts[node] for node in [self.tree.root, *self.tree.nodes()])
        assert len(self.watch) == len(self.waiting)

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            while self.running:
                self.give_up(0)
            self.refresh(100)
            self.evict(10**6)
            self.refresh(100)
            assert all(req.matched_len == 0 for req in self.waiting)
            assert not self.model.pages


TestRadixTree = RadixTreeMachine.TestCase
TestRadixTree.settings = settings(max_examples=250, stateful_step_count=45, deadline=None)
