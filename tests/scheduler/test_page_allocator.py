"""The free list of KV pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.scheduler.page_allocator import PageAllocator


def test_it_gives_out_every_page_once_and_then_none() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.alloc(2), allocator.alloc(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.alloc(1) is None
    assert allocator.alloc(0) == []


def test_it_takes_nothing_when_it_cannot_give_all() -> None:
    allocator = PageAllocator(3)
    assert allocator.alloc(4) is None
    assert allocator.num_free_pages == 3


def test_freeing_a_page_twice_is_an_error() -> None:
    allocator = PageAllocator(3)
    page_ids = allocator.alloc(2)
    assert page_ids is not None
    allocator.free(page_ids)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(page_ids[:1])


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_a_page_is_never_with_two_owners_and_none_is_lost(num_pages: int, events: list[tuple[bool, int]]) -> None:
    allocator, owned = PageAllocator(num_pages), list[list[int]]()
    for is_alloc, number in events:
        if is_alloc:
            page_ids = allocator.alloc(number)
            assert (page_ids is None) == (number > num_pages - sum(map(len, owned)))
            owned.append(page_ids or [])
        elif owned:
            allocator.free(owned.pop(number % len(owned)))
        assert sorted([*allocator.free_page_ids, *(page for each in owned for page in each)]) == list(range(num_pages))
