"""Pages as requests get them and give them back."""

from array import array

import pytest

from millstream.common.messages import TokenizedGenerateReqInput
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.req import Req


def start(pool: PagePool, token_ids: list[int], priority: int = 0) -> Req:
    """A request that has its prompt computed."""
    packed = array("i", token_ids)
    message = TokenizedGenerateReqInput("", "", 0.0, packed.tobytes(), SamplingParams())
    req = Req(message, packed, 1, priority)
    pool.init_next_round_input(req)
    assert req.last_node is not None
    pool.tree_cache.inc_lock_ref(req.last_node)
    assert pool.grow(req, len(token_ids))
    req.kv_committed_len = len(token_ids)
    return req


def test_growing_takes_nothing_and_raises_nothing_when_pages_are_short() -> None:
    pool = PagePool(4, 2)
    req = start(pool, [1, 2, 3, 4])
    assert not pool.grow(req, 10)
    assert (len(req.page_ids), req.kv_allocated_len, pool.num_available_pages) == (2, 4, 2)
    assert pool.grow(req, 8)
    assert (len(req.page_ids), req.kv_allocated_len, pool.num_available_pages) == (4, 8, 0)


def test_growing_evicts_what_nobody_uses() -> None:
    pool = PagePool(4, 2)
    pool.cache_finished_req(start(pool, [1, 2, 3, 4]))
    req = start(pool, [5, 6, 7, 8, 9, 10])
    assert len(req.page_ids) == 3
    assert pool.tree_cache.evictable_pages == 1


def test_a_request_that_is_done_counts_as_a_hit_of_all_that_it_used() -> None:
    pool = PagePool(8, 2, eviction_policy="lfu")
    pool.cache_finished_req(start(pool, [1, 2, 3, 4]))
    pool.cache_finished_req(start(pool, [1, 2, 5, 6]))
    hits = {tuple(node.key[::4]): node.hit_count for node in pool.tree_cache.nodes()}
    assert hits == {(1, 2): 2, (3, 4): 1, (5, 6): 1}


def test_what_an_urgent_request_used_outlives_what_others_used_later() -> None:
    pool = PagePool(4, 2, eviction_policy="priority")
    pool.cache_finished_req(start(pool, [1, 2, 3, 4], priority=1))
    pool.cache_finished_req(start(pool, [5, 6, 7, 8], priority=-1))
    start(pool, [9, 10, 11, 12])
    assert [bytes(node.key[::4]) for node in pool.tree_cache.nodes() if node.lock_ref == 0] == [bytes([1, 2, 3, 4])]


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_every_page_comes_back(disable_radix_cache: bool) -> None:
    pool = PagePool(8, 2, disable_radix_cache=disable_radix_cache)
    reqs = [start(pool, [1, 2, 3]), start(pool, [1, 2, 3, 4, 5])]
    for req in reqs:
        pool.cache_unfinished_req(req)
    for req in reqs:
        pool.cache_finished_req(req)
    assert pool.num_available_pages == 8
    pool.reset()
    assert pool.allocator.num_free_pages == 8
    assert pool.allocator.num_double_frees == 0
