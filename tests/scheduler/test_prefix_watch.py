"""Waiting requests hear of what changes below them: what is touched, and what is not."""

from array import array

import pytest

from millstream.common.messages import TokenizedGenerateReqInput
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.prefix_watch import PrefixWatch
from millstream.scheduler.radix_tree import RadixCache
from millstream.scheduler.req import Req


def key_of(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def waiting_req(*token_ids: int) -> Req:
    message = TokenizedGenerateReqInput("", "", 0.0, key_of(*token_ids), SamplingParams())
    return Req(message, array("i", token_ids), 1)


def insert(tree: RadixCache, *token_ids: int) -> None:
    tree.insert(tree.root, (None, None), key_of(*token_ids), list(token_ids))


def test_a_request_is_looked_up_when_it_comes_and_when_its_next_page_is_cached() -> None:
    tree = RadixCache(1)
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3, 4)
    insert(tree, 1)
    watch.add(req)
    assert req.matched_len == 1
    insert(tree, 1, 2, 3, 4)
    assert req.matched_len == 1
    assert watch.refresh() == [req]
    assert req.matched_len == 3  # the last token is always computed
    assert watch.refresh() == []


def test_a_request_whose_prefix_is_evicted_hears_of_it_page_by_page() -> None:
    tree = RadixCache(1)
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3, 4)
    insert(tree, 1, 2, 3)
    watch.add(req)
    for matched_len in (2, 1, 0):
        tree.evict(1)
        assert watch.refresh() == [req]
        assert req.matched_len == matched_len


def test_a_page_that_nobody_waits_for_touches_nobody() -> None:
    tree = RadixCache(1)
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3, 4)
    insert(tree, 1)
    watch.add(req)
    insert(tree, 1, 5)
    insert(tree, 7)
    assert not watch._changed


def test_of_ten_thousand_waiting_requests_an_insert_touches_those_whose_next_page_it_is() -> None:
    tree = RadixCache(1)
    watch = PrefixWatch(tree)
    reqs = [waiting_req(number % 1000, 2, 3) for number in range(10_000)]
    for req in reqs:
        watch.add(req)
    insert(tree, 5)
    assert len(watch._changed) == 1
    assert len(watch._changed[0]) == 10
    assert len(watch.refresh(10_000)) == 10
    assert [req.matched_len for req in reqs] == [int(number % 1000 == 5) for number in range(10_000)]


def test_a_refresh_looks_up_no_more_than_it_is_allowed_to_and_goes_on_at_the_next() -> None:
    tree = RadixCache(1)
    watch, reqs = PrefixWatch(tree), [waiting_req(1, 2) for _ in range(10)]
    for req in reqs:
        watch.add(req)
    insert(tree, 1)
    assert watch.refresh(4) == reqs[:4]
    watch.remove(reqs[4])
    assert watch.refresh(4) == reqs[5:9]
    assert watch.refresh(4) == reqs[9:]


def test_pages_that_go_and_come_back_before_it_was_looked_up_are_no_change() -> None:
    tree = RadixCache(1)
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3)
    insert(tree, 1)
    watch.add(req)
    insert(tree, 1, 2)
    tree.evict(1)
    assert watch.refresh() == []
    assert req.matched_len == 1


def test_a_prefix_that_is_back_in_another_node_is_a_change_of_the_same_length() -> None:
    tree = RadixCache(1)
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3)
    insert(tree, 1, 2)
    watch.add(req)
    before = watch.node_of(req)
    tree.evict(2)
    insert(tree, 1, 2)
    assert watch.refresh() == [req]
    assert req.matched_len == 2
    assert watch.node_of(req) is not before


def test_one_that_comes_while_others_are_set_aside_is_not_lost_with_them() -> None:
    tree = RadixCache(1)
    watch, early, late = PrefixWatch(tree), waiting_req(1, 2), waiting_req(1, 2)
    watch.add(early)
    insert(tree, 1)
    tree.evict(1)
    watch.add(late)
    watch.remove(early)
    insert(tree, 1)
    assert watch.refresh() == [late]


def test_an_output_where_a_match_ends_does_not_grow_in_place() -> None:
    tree = RadixCache(1)
    node = tree.append(tree.root, (None, None), key_of(1), [1])
    watch, req = PrefixWatch(tree), waiting_req(1, 2, 3)
    watch.add(req)
    assert tree.append(node, (None, None), key_of(2), [2]) is not node
    watch.refresh()
    assert req.matched_len == 2


def test_waiting_requests_are_counted_at_and_above_the_node_where_they_wait() -> None:
    tree = RadixCache(1)
    watch = PrefixWatch(tree)
    insert(tree, 1, 2, 3)
    short, long = waiting_req(1, 9), waiting_req(1, 2, 3, 9)
    watch.add(long)
    watch.add(short)
    upper, lower = watch.node_of(short), watch.node_of(long)
    assert lower.parent is upper
    assert [watch.num_waiting(node) for node in (tree.root, upper, lower)] == [2, 2, 1]
    watch.remove(long)
    assert [watch.num_waiting(node) for node in (tree.root, upper, lower)] == [1, 1, 0]


def test_it_locks_nothing() -> None:
    tree = RadixCache(1)
    watch = PrefixWatch(tree)
    insert(tree, 1, 2, 3)
    watch.add(waiting_req(1, 2, 3, 4))
    assert len(tree.evict(3)) == 3


def test_emptying_the_tree_concerns_all_that_had_matched_something() -> None:
    tree = RadixCache(1)
    watch, req, other = PrefixWatch(tree), waiting_req(1, 2, 3), waiting_req(7, 8)
    insert(tree, 1, 2)
    watch.add(req)
    watch.add(other)
    tree.reset()
    assert watch.refresh() == [req]
    assert req.matched_len == 0
    insert(tree, 1)
    assert watch.refresh() == [req]


def test_it_leaves_nothing_behind() -> None:
    tree = RadixCache(1)
    watch, reqs = PrefixWatch(tree), [waiting_req(1, 2, number) for number in range(5)]
    for req in reqs:
        watch.add(req)
    insert(tree, 1, 2)
    watch.refresh(3)
    for req in reqs:
        watch.remove(req)
    watch.refresh()
    assert (len(watch), watch._places, watch._buckets, len(watch._changed)) == (0, {}, {}, 0)
    assert tree.root.num_waiting == 0


def test_removing_one_that_does_not_wait_is_an_error() -> None:
    with pytest.raises(KeyError):
        PrefixWatch(RadixCache(1)).remove(waiting_req(1))
