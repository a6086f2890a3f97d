"""Lists of tokens that belong to rows. S rows of a step, P of them with a list, M entries of a row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

NO_SLOT = -1

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


class RowLists(NamedTuple):
    """Lists of P rows, as wide as the longest of them: row s of a step has [starts_S[s], ends_S[s]) of the flat entries."""

    rows_P: Int32Array
    starts_S: Int32Array
    ends_S: Int32Array
    ids_PM: Int32Array
    values_PM: NDArray[Any]


class RowTokens:
    """A list of tokens, each with a value of a fixed type and shape, for the rows that have one.

    A row with a list has a slot; slots and their width grow as needed, so rows without one cost nothing.
    """

    def __init__(self, max_rows: int, value_type: DTypeLike, value_shape: tuple[int, ...] = ()) -> None:
        self.lens: Int32Array = np.zeros(max_rows, np.int32)
        self._slots: Int32Array = np.full(max_rows, NO_SLOT, np.int32)
        self._value_type = value_type
        self._value_shape = value_shape
        self._forget_all()

    def _forget_all(self) -> None:
        self._free_slots: list[int] = []
        self._ids: Int32Array = np.zeros((0, 0), np.int32)
        self._values = np.zeros((0, 0, *self._value_shape), self._value_type)

    def set(self, row: int, token_ids: "Sequence[int] | Int32Array", values: object) -> None:
        """The list of a row, in place of the one that it had."""
        self.clear(row)
        num = len(token_ids)
        if not num:
            return
        self._make_room(1, num)
        slot = self._free_slots.pop()
        self._slots[row], self.lens[row] = slot, num
        self._ids[slot, :num] = token_ids
        self._values[slot, :num] = values

    def clear(self, row: int) -> None:
        """The row has no list any more."""
        if self._slots[row] == NO_SLOT:
            return
        self._free_slots.append(int(self._slots[row]))
        self._slots[row], self.lens[row] = NO_SLOT, 0
        if len(self._free_slots) == len(self._ids):
            self._forget_all()

    def add_to_values(self, rows_P: Int32Array, token_ids_P: NDArray[np.int64]) -> None:
        """One more of a token for each of these rows: its value is raised by 1, a new token gets the value 1."""
        if not len(rows_P):
            return
        for row in rows_P[self._slots[rows_P] == NO_SLOT].tolist():
            self._make_room(1, 1)
            self._slots[row] = self._free_slots.pop()
        self._make_room(0, int(self.lens[rows_P].max()) + 1)
        slots_P, lens_P = self._slots[rows_P], self.lens[rows_P]
        is_token_PM = self._ids[slots_P, : lens_P.max()] == token_ids_P[:, None]
        is_token_PM &= np.arange(is_token_PM.shape[1]) < lens_P[:, None]
        is_known_P = is_token_PM.any(1)
        index_P = np.where(is_known_P, is_token_PM.argmax(1) if is_token_PM.size else 0, lens_P)
        self._ids[slots_P, index_P] = token_ids_P
        self._values[slots_P, index_P] = np.where(is_known_P, self._values[slots_P, index_P], 0) + 1
        self.lens[rows_P] += ~is_known_P

    def read(self, rows_S: Int32Array, is_wanted_S: BoolArray | None = None) -> "RowLists | None":
        """The lists of those of the rows that have one; None where no row has."""
        lens_S = self.lens[rows_S] if is_wanted_S is None else self.lens[rows_S] * is_wanted_S
        width = int(lens_S.max(initial=0))
        if width == 0:
            return None
        has_list_S = np.asarray(lens_S > 0)
        rows_P = rows_S[has_list_S]
        slots_P = self._slots[rows_P]
        starts_S = (np.cumsum(has_list_S, dtype=np.int32) - has_list_S.astype(np.int32)) * np.int32(width)
        return RowLists(rows_P, starts_S, starts_S + lens_S, self._ids[slots_P, :width], self._values[slots_P, :width])

    def _make_room(self, num_slots: int, width: int) -> None:
        """So many free slots, and lists of that length; both grow by doubling."""
        old_slots, old_width = self._ids.shape
        more_slots = max(num_slots, old_slots) if num_slots > len(self._free_slots) else 0
        more_width = max(width - old_width, old_width) if width > old_width else 0
        if more_slots == 0 and more_width == 0:
            return
        self._free_slots += range(old_slots + more_slots - 1, old_slots - 1, -1)
        room = ((0, more_slots), (0, more_width))
        self._ids = np.pad(self._ids, room)
        self._values = np.pad(self._values, (*room, *((0, 0) for _ in self._value_shape)))
