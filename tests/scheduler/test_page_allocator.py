"""The free list of KV pages: rules one by one, then against a plain set."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


def test_the_last_page_freed_is_the_first_given_out() -> None:
    allocator = PageAllocator(8)
    page_ids = allocator.alloc(8)
    assert page_ids is not None
    allocator.free([3, 5])
    assert allocator.alloc(1) == [5]


def test_a_page_that_is_freed_twice_is_counted_and_logged_and_not_given_to_two(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allocator = PageAllocator(3)
    page_ids = allocator.alloc(3)
    assert page_ids is not None
    allocator.free([1])
    allocator.free([2, 1, 2])
    assert allocator.num_double_frees == 2
    assert "page 1 was freed twice" in caplog.text
    assert sorted(allocator.free_page_ids) == [1, 2]


class PageAllocatorMachine(RuleBasedStateMachine):
    """Owners of pages against the set of those that nobody owns."""

    @initialize(num_pages=st.integers(1, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.free_pages = set(range(num_pages))
        self.owners: list[list[int]] = []
        self.num_double_frees = 0

    @rule(num_pages=st.integers(0, 12))
    def alloc(self, num_pages: int) -> None:
        page_ids = self.allocator.alloc(num_pages)
        if num_pages > len(self.free_pages):
            assert page_ids is None
            return
        assert page_ids is not None
        assert len(page_ids) == num_pages
        assert set(page_ids) <= self.free_pages
        self.free_pages -= set(page_ids)
        self.owners.append(page_ids)

    @precondition(lambda self: self.owners)
    @rule(which=st.integers(0, 99), num_kept=st.integers(0, 3))
    def free(self, which: int, num_kept: int) -> None:
        """The last pages of one owner, or all of them."""
        owned = self.owners.pop(which % len(self.owners))
        self.allocator.free(owned[num_kept:])
        self.free_pages |= set(owned[num_kept:])
        if owned[:num_kept]:
            self.owners.append(owned[:num_kept])

    @precondition(lambda self: self.free_pages)
    @rule(which=st.integers(0, 99))
    def free_what_is_free(self, which: int) -> None:
        self.allocator.free([sorted(self.free_pages)[which % len(self.free_pages)]])
        self.num_double_frees += 1

    @invariant()
    def every_page_has_one_place(self) -> None:
        page_ids = self.allocator.free_page_ids
        assert len(page_ids) == self.allocator.num_free_pages == len(self.free_pages)
        assert set(page_ids) == self.free_pages
        owned = [page_id for owner in self.owners for page_id in owner]
        assert sorted([*page_ids, *owned]) == list(range(self.allocator.num_pages))
        assert self.allocator.num_double_frees == self.num_double_frees


TestPageAllocator = PageAllocatorMachine.TestCase
TestPageAllocator.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
