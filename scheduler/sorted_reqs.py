"""Waiting requests that stay sorted by a key while they come and go."""

import bisect
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from .req import Req

Entry = tuple[Any, int, Req]  # key, order of coming, request


class SortedReqs:
    """A sorted list: O(log n) comparisons to add and to remove, and a move of pointers."""

    def __init__(self, key: Callable[[Req], Any]) -> None:
        self._key = key
        self._entries: list[Entry] = []
        self._entry_of: dict[Req, Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Req]:
        return (entry[2] for entry in self._entries)

    def add(self, req: Req) -> None:
        """Insert by the key that the request has now, after its equals."""
        entry = (self._key(req), next(self._numbers), req)
        self._entry_of[req] = entry
        bisect.insort(self._entries, entry)

    def remove(self, req: Req) -> None:
        """Take it out, whatever its key would be by now; KeyError if it is not there."""
        entry = self._entry_of.pop(req)
        del self._entries[bisect.bisect_left(self._entries, entry)]

    def num_up_to(self, key: Any) -> int:
        """How many have `key` or a smaller one."""
        return bisect.bisect_right(self._entries, key, key=_entry_key)


def _entry_key(entry: Entry) -> Any:
    return entry[0]
