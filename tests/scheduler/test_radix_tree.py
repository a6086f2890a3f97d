"""The radix cache: its rules one by one. (test_radix_tree_machine.py mixes them all.)"""

from array import array

import pytest

from millstream.scheduler.radix_tree import RadixCache


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


@pytest.mark.parametrize("num_tokens", range(1, 12))
@pytest.mark.parametrize("goes_on", [[], [99]])
def test_a_match_inside_a_node_splits_it_once(num_tokens: int, goes_on: list[int]) -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, None, key_of(*range(12)), list(range(12)))
    tree.match_prefix(None, key_of(*range(num_tokens), *goes_on))
    assert sorted(len(node.page_ids) for node in tree.nodes()) == sorted([num_tokens, 12 - num_tokens])


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


def test_a_tree_in_use_is_not_emptied() -> None:
    tree = RadixCache(1)
    tree.append(tree.root, None, key_of(1), [0])
    with pytest.raises(AssertionError, match="while requests use it"):
        tree.reset()


def test_reset_returns_every_page() -> None:
    tree = RadixCache(1)
    tree.insert(tree.root, None, key_of(1, 2, 3), [0, 1, 2])
    tree.insert(tree.root, None, key_of(1, 5), [9, 4])
    assert sorted(tree.reset()) == [0, 1, 2, 4]
    assert tree.match_prefix(None, key_of(1, 2)).page_ids == []
    assert tree.evictable_pages == 0
