"""The obvious radix cache: a dictionary from every cached prefix to its page, and what the eviction policies ask of it.

A prefix is a namespace and a tuple of letters; a letter stands for one page of tokens (`PageText`).
"""

from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import takewhile

Prefix = tuple[Hashable, tuple[int, ...]]


class PageText:
    """Pages of `page_size` tokens for the letters 0, 1, 2: two differ in the last token alone, one in all of them."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        zeros = [0] * (page_size - 1)
        self.pages = [[*zeros, 0], [*zeros, 1], [2] * page_size]
        self.letters = {array("i", page).tobytes(): letter for letter, page in enumerate(self.pages)}

    def tokens(self, letters: Iterable[int]) -> "array[int]":
        return array("i", [token for letter in letters for token in self.pages[letter]])

    def key(self, letters: Iterable[int]) -> bytes:
        return self.tokens(letters).tobytes()

    def letters_of(self, key: bytes | bytearray) -> tuple[int, ...]:
        size = 4 * self.page_size
        return tuple(self.letters[bytes(key[start : start + size])] for start in range(0, len(key), size))


@dataclass
class CachedPage:
    page_id: int
    creation: int
    used: int
    hits: int = 0
    priority: float = float("-inf")
    locks: int = 0


LEAST_GOES_FIRST: dict[str, Callable[[CachedPage], tuple[float, int]]] = {
    "lru": lambda page: (page.used, 0),
    "mru": lambda page: (-page.used, 0),
    "lfu": lambda page: (page.hits, page.used),
    "fifo": lambda page: (page.creation, 0),
    "priority": lambda page: (page.priority, page.used),
}


class DictionaryOfPrefixes:
    """Every page is an entry of its own; there are no nodes, no heap and no splits."""

    def __init__(self, policy: str) -> None:
        self.key = LEAST_GOES_FIRST[policy]
        self.pages: dict[Prefix, CachedPage] = {}
        self.time = 0

    def cached(self, namespace: Hashable, letters: tuple[int, ...]) -> list[CachedPage]:
        """The pages of the longest cached prefix."""
        prefixes = ((namespace, letters[:end]) for end in range(1, len(letters) + 1))
        return [self.pages[prefix] for prefix in takewhile(self.pages.__contains__, prefixes)]

    def touch(self, pages: Iterable[CachedPage]) -> None:
        self.time += 1
        for page in pages:
            page.used = self.time

    def add(self, namespace: Hashable, letters: tuple[int, ...], start: int, page_ids: list[int]) -> list[CachedPage]:
        """Cache the letters from `start` on, where they are not cached yet; returns the new pages."""
        present = self.cached(namespace, letters)
        self.touch(present[start:])
        new = []
        for end, page_id in enumerate(page_ids[len(present) - start :], len(present) + 1):
            new.append(CachedPage(page_id, self.time, self.time))
            self.pages[namespace, letters[:end]] = new[-1]
        return new

    def evictable_leaves(self) -> dict[int, Prefix]:
        """By page id."""
        inner = {(namespace, letters[:-1]) for namespace, letters in self.pages}
        return {page.page_id: prefix for prefix, page in self.pages.items() if prefix not in inner and page.locks == 0}

    def evict(self, page_ids: list[int]) -> None:
        """Follow an eviction page by page: each must be a leaf that nobody uses, with the least key of all such."""
        for page_id in page_ids:
            leaves = self.evictable_leaves()
            assert page_id in leaves, f"page {page_id} is in use, or not at the end of a run"
            keys = [self.key(self.pages[prefix]) for prefix in leaves.values()]
            assert self.key(self.pages[leaves[page_id]]) == min(keys), f"page {page_id} went before its turn"
            del self.pages[leaves[page_id]]
