"""The free list of KV pages of one KV group."""

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1, the last freed first (its memory is the likeliest to be warm)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
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
        if num_pages == 0:
            return []
        page_ids = self._free_page_ids[-num_pages:]
        del self._free_page_ids[-num_pages:]
        for page_id in page_ids:
            self._is_free[page_id] = 0
        return page_ids

    def free(self, page_ids: Iterable[int]) -> None:
        """Give pages back; AssertionError for a page that is free already."""
        for page_id in page_ids:
            assert not self._is_free[page_id], f"page {page_id} is freed twice"
            self._is_free[page_id] = 1
            self._free_page_ids.append(page_id)
