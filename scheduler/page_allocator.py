"""The free list of KV pages of one KV group."""

import logging
from collections.abc import Iterable

logger = logging.getLogger(__name__)


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1, the last freed first (its memory is the likeliest to be warm).

    A page that is freed while it is free would later have two owners. It is left where it is, logged, and counted in
    `num_double_frees`, which is 0 as long as the scheduler is right: a server does not end for that.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_double_frees = 0
        self._free_page_ids = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_pages)

    @property
    def num_free_pages(self) -> int:
        """Pages that `alloc` can give out."""
        return len(self._free_page_ids)

    @property
    def free_page_ids(self) -> list[int]:
        """A copy of the free list, for checks."""
        return self._free_page_ids.copy()

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take `num_pages` pages, or None (and take nothing) when there are fewer."""
        if num_pages > len(self._free_page_ids):
            return None
        if num_pages <= 0:
            return []
        page_ids = self._free_page_ids[-num_pages:]
        del self._free_page_ids[-num_pages:]
        is_free = self._is_free
        for page_id in page_ids:
            is_free[page_id] = 0
        return page_ids

    def free(self, page_ids: Iterable[int]) -> None:
        """Give pages back."""
        is_free, append = self._is_free, self._free_page_ids.append
        for page_id in page_ids:
            if is_free[page_id]:
                self._refuse(page_id)
            else:
                is_free[page_id] = 1
                append(page_id)

    def _refuse(self, page_id: int) -> None:
        self.num_double_frees += 1
        logger.error("KV page %d was freed twice", page_id)
