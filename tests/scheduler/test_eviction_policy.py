"""What each eviction policy is for: a load that it serves better than the others do, and the order of its heap."""

from array import array
from collections.abc import Iterable

import pytest

from millstream.common.config import EVICTION_POLICIES
from millstream.scheduler.eviction_policy import POLICIES
from millstream.scheduler.radix_tree import RadixCache

NUM_PAGES = 8
PAGES_EACH = 2


def hits(policy: str, prompts: Iterable[int | tuple[int, int]]) -> list[bool]:
    """Serve prompts of two pages, one by one, with a cache of eight: which of them were cached?

    A prompt is its number, or (number, priority).
    """
    tree = RadixCache(1, eviction_policy=policy)
    free, found = list(range(NUM_PAGES)), []
    for prompt in prompts:
        number, priority = prompt if isinstance(prompt, tuple) else (prompt, 0)
        key = array("i", [number] * PAGES_EACH).tobytes()
        match = tree.match_prefix(None, key)
        found.append(len(match.page_ids) == PAGES_EACH)
        tree.inc_lock_ref(match.last_node)
        num_missing = PAGES_EACH - len(match.page_ids)
        free += tree.evict(max(0, num_missing - len(free)))
        page_ids = [free.pop() for _ in range(num_missing)]
        start = len(match.page_ids)
        end = tree.insert(match.last_node, None, key[4 * start :], page_ids).last_node
        tree.inc_hit_count(end, priority)
        tree.dec_lock_ref(match.last_node)
    return found


def test_every_policy_of_the_command_line_is_there() -> None:
    assert set(POLICIES) == set(EVICTION_POLICIES)


def test_lru_keeps_what_is_in_use_now_when_the_topic_changes() -> None:
    yesterday, today = [1, 2, 3] * 5, [4, 5, 6] * 4
    assert all(hits("lru", yesterday + today)[-9:])
    assert not all(hits("lfu", yesterday + today)[-9:])
    assert not all(hits("mru", yesterday + today)[-9:])


def test_lfu_keeps_popular_prefixes_through_a_flood_of_prompts_that_come_once() -> None:
    popular, flood = [1, 2, 1, 2], list(range(100, 120))
    load = [*popular, *flood, 1, 2]
    assert hits("lfu", load)[-2:] == [True, True]
    assert hits("lru", load)[-2:] == [False, False]
    assert hits("fifo", load)[-2:] == [False, False]


def test_fifo_lets_no_prefix_stay_for_ever_however_often_it_is_used() -> None:
    load = [1, *[number for new in range(100, 110) for number in (new, 1)]]
    assert all(hits("lru", load)[2::2])
    assert not all(hits("fifo", load)[2::2])
    tree = RadixCache(1, eviction_policy="fifo")
    for number in (1, 2, 3):
        tree.insert(tree.root, None, array("i", [number]).tobytes(), [number])
    tree.match_prefix(None, array("i", [1]).tobytes())
    assert tree.evict(3) == [1, 2, 3]


def test_mru_serves_most_of_a_loop_over_more_than_the_cache_holds() -> None:
    loop = [1, 2, 3, 4, 5] * 6
    assert sum(hits("lru", loop)) == 0
    assert sum(hits("mru", loop)) > len(loop) // 2


def test_priority_keeps_bulk_work_from_pushing_out_the_prefixes_of_urgent_work() -> None:
    load = [(1, 5), (2, 5), *[(number, 0) for number in range(100, 120)], (1, 5), (2, 5)]
    assert hits("priority", load)[-2:] == [True, True]
    assert hits("lru", load)[-2:] == [False, False]


def test_a_prefix_has_the_priority_of_the_most_urgent_request_that_used_it() -> None:
    load = [(1, 5), (1, -5), *[(number, 0) for number in range(100, 120)], (1, 0)]
    assert hits("priority", load)[-1]


def test_among_equals_priority_and_lfu_go_by_last_use() -> None:
    for policy in ("priority", "lfu"):
        assert hits(policy, [1, 2, 3, 4, 5, 2, 1]) == [False, False, False, False, False, True, False]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_heap_stays_in_proportion_to_the_tree_when_nothing_is_evicted(policy: str) -> None:
    tree = RadixCache(1, eviction_policy=policy)
    keys = [array("i", [number]).tobytes() for number in range(10)]
    for page_id, key in enumerate(keys):
        tree.insert(tree.root, None, key, [page_id])
    for _ in range(100):
        for key in keys:
            match = tree.match_prefix(None, key)
            tree.inc_lock_ref(match.last_node)
            tree.inc_hit_count(match.last_node, 0)
            tree.dec_lock_ref(match.last_node)
    assert len(tree._heap._entries) <= 2 * len(keys)
    assert len(tree.evict(10)) == 10
