"""The radix cache: rules one by one, then against a plain dictionary of prefixes."""

import itertools
from array import array
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.scheduler.radix_tree import RadixCache, TreeNode

Prefix = tuple[Hashable, tuple[int, ...]]


def key_of(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def test_only_whole_pages_match() -> None:
    tree = RadixCache(2)
    tree.insert(tree.root, None, key_of(1, 2, 3, 4), [10, 11])
    assert tree.match_prefix(None, key_of(1, 2, 3, 4, 5)).page_ids == [10, 11]
    assert tree.match_prefix(None, key_of(1, 2, 3)).page_ids == [10]
    assert tree.match_prefix(None, key_of(1)).page_ids == []
    assert tree.match_prefix(None, key_of(2, 1)).page_ids == []


def test_a_partial_match_splits_the_node_and_keeps_its_lock() -> None:
    tree = RadixCache(1)
    lower = tree.insert(tree.root, None, key_of(1, 2, 3, 4), [0, 1, 2, 3]).last_node
    tree.inc_lock_ref(lower)
    upper = tree.match_prefix(None, key_of(1, 2, 9)).last_node
    assert (upper.page_ids, lower.page_ids, lower.parent) == ([0, 1], [2, 3], upper)
    assert (upper.lock_ref, lower.lock_ref) == (1, 1)
    assert (tree.evictable_pages, tree.protected_pages) == (0, 4)
    tree.dec_lock_ref(lower)
    assert (tree.evictable_pages, tree.protected_pages) == (4, 0)


def test_equal_tokens_of_two_namespaces_share_nothing() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, ("lora", None), key_of(1, 2), [0, 1])
    assert tree.match_prefix((None, None), key_of(1, 2)).page_ids == []
    assert tree.match_prefix(("lora", "salt"), key_of(1, 2)).page_ids == []
    assert tree.match_prefix(("lora", None), key_of(1, 2)).page_ids == [0, 1]


def test_inserting_says_how_many_pages_were_there_and_takes_only_the_rest() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, None, key_of(1, 2, 3), [0, 1, 2])
    result = tree.insert(tree.root, None, key_of(1, 2, 7, 8), [5, 6, 7, 8])
    assert result.num_present_pages == 2
    assert tree.match_prefix(None, key_of(1, 2, 7, 8)).page_ids == [0, 1, 7, 8]
    assert tree.evictable_pages == 5


def test_the_least_recently_used_run_goes_first_and_from_its_end() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, None, key_of(1, 2, 3), [0, 1, 2])
    tree.insert(tree.root, None, key_of(5, 6), [5, 6])
    tree.match_prefix(None, key_of(1, 2, 3))
    assert tree.evict(1) == [6]
    assert tree.match_prefix(None, key_of(5, 6)).page_ids == [5]
    assert tree.evict(2) == [2, 1]


def test_what_is_locked_is_not_evicted() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, None, key_of(1, 2), [0, 1]).last_node
    tree.insert(node, None, key_of(3, 4), [2, 3])
    tree.inc_lock_ref(node)
    assert sorted(tree.evict(10)) == [2, 3]
    assert tree.evict(1) == []
    tree.dec_lock_ref(node)
    assert sorted(tree.evict(10)) == [0, 1]


def test_a_leaf_that_was_locked_after_it_could_be_evicted_stays() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, None, key_of(1, 2), [0, 1]).last_node
    tree.inc_lock_ref(node)
    assert tree.evict(1) == []


def test_unlocking_once_too_often_is_an_error() -> None:
    tree = RadixCache(1)
    node = tree.insert(tree.root, None, key_of(1), [0]).last_node
    with pytest.raises(AssertionError, match="unlocked more often"):
        tree.dec_lock_ref(node)


def test_an_output_that_grows_stays_one_node() -> None:
    tree = RadixCache(1)
    node = tree.append(tree.root, None, key_of(0), [0])
    for token_id in range(1, 50):
        node = tree.append(node, None, key_of(token_id), [token_id])
    assert len(list(tree.nodes())) == 1
    assert tree.match_prefix(None, key_of(*range(50))).page_ids == list(range(50))
    assert tree.protected_pages == 50


def test_a_node_that_others_use_does_not_grow() -> None:
    tree = RadixCache(1)
    node = tree.append(tree.root, None, key_of(1), [0])
    tree.inc_lock_ref(node)
    child = tree.append(node, None, key_of(2), [1])
    assert child is not node
    assert node.page_ids == [0]
    tree.dec_lock_ref(child)
    tree.dec_lock_ref(node)
    assert tree.evictable_pages == 2


def test_disabled_it_matches_nothing() -> None:
    tree = RadixCache(1, disabled=True)
    assert tree.match_prefix(None, key_of(1, 2)).page_ids == []


def test_reset_returns_every_page() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, None, key_of(1, 2, 3), [0, 1, 2])
    tree.insert(tree.root, None, key_of(1, 5), [9, 4])
    assert sorted(tree.reset()) == [0, 1, 2, 4]
    assert tree.match_prefix(None, key_of(1, 2)).page_ids == []
    assert tree.evictable_pages == 0


class DictionaryOfPrefixes:
    """The obvious cache: a dictionary from each cached whole-page prefix to its page and its last use."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.time = 0

    def prefixes(self, namespace: Hashable, token_ids: tuple[int, ...]) -> list[Prefix]:
        ends = range(self.page_size, len(token_ids) + 1, self.page_size)
        return [(namespace, token_ids[:end]) for end in ends]

    def match(self, namespace: Hashable, token_ids: tuple[int, ...]) -> list[Prefix]:
        path = list(itertools.takewhile(self.pages.__contains__, self.prefixes(namespace, token_ids)))
        self.touch(path)
        return path

    def touch(self, path: list[Prefix]) -> None:
        self.time += 1
        self.used.update(dict.fromkeys(path, self.time))

    def evictable_leaves(self) -> list[Prefix]:
        inner = {(namespace, token_ids[: -self.page_size]) for namespace, token_ids in self.pages}
        return [prefix for prefix in self.pages if prefix not in inner and not self.locks.get(prefix)]

    def evict(self, page_ids: list[int]) -> None:
        """Follow an eviction, page by page, and check that each page was a leaf with the oldest use."""
        by_page = {page_id: prefix for prefix, page_id in self.pages.items()}
        for page_id in page_ids:
            prefix, leaves = by_page[page_id], self.evictable_leaves()
            assert prefix in leaves
            assert self.used[prefix] == min(self.used[leaf] for leaf in leaves)
            del self.pages[prefix]


tokens = st.lists(st.integers(0, 2), max_size=14).map(tuple)
namespaces = st.sampled_from([None, "salt"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("match"), namespaces, tokens),
        st.tuples(st.just("insert"), namespaces, tokens),
        st.tuples(st.just("lock"), namespaces, tokens),
        st.tuples(st.just("unlock"), st.none(), st.lists(st.integers(0, 50), min_size=1, max_size=1).map(tuple)),
        st.tuples(st.just("evict"), st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=1).map(tuple)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 2, 4]), operations)
def test_it_agrees_with_a_dictionary_of_prefixes(
    page_size: int, script: list[tuple[str, Hashable, tuple[int, ...]]]
) -> None:
    tree, model, fresh = RadixCache(page_size), DictionaryOfPrefixes(page_size), itertools.count()
    locked: list[tuple[TreeNode, list[Prefix]]] = []
    for kind, namespace, values in script:
        if kind in {"match", "lock"}:
            match, path = tree.match_prefix(namespace, key_of(*values)), model.match(namespace, values)
            assert match.page_ids == [model.pages[prefix] for prefix in path]
            if kind == "lock":
                tree.inc_lock_ref(match.last_node)
                locked.append((match.last_node, path))
                model.locks.update({prefix: model.locks.get(prefix, 0) + 1 for prefix in path})
        elif kind == "insert":
            path = model.prefixes(namespace, values)
            page_ids = [next(fresh) for _ in path]
            key = key_of(*values[: len(path) * page_size])
            num_present = tree.insert(tree.root, namespace, key, page_ids).num_present_pages
            assert num_present == sum(prefix in model.pages for prefix in path)
            model.pages.update(dict(zip(path[num_present:], page_ids[num_present:], strict=True)))
            model.touch(path)
        elif kind == "unlock" and locked:
            node, path = locked.pop(values[0] % len(locked))
            tree.dec_lock_ref(node)
            model.touch(path)
            model.locks.update({prefix: model.locks[prefix] - 1 for prefix in path})
        elif kind == "evict":
            evicted = tree.evict(values[0])
            assert len(evicted) == min(values[0], tree.evictable_pages + len(evicted))
            model.evict(evicted)
        num_locked = sum(count > 0 for count in model.locks.values())
        assert (tree.protected_pages, tree.evictable_pages) == (num_locked, len(model.pages) - num_locked)
