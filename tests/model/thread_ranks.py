"""Tensor-parallel ranks as threads of one process: a communicator over a barrier, for tests of the decoder alone."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from millstream.tp_worker.communicator import Communicator

R = TypeVar("R")


class Meeting:
    """Where the ranks leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, copied."""
        self.slots[rank] = x.clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadCommunicator(Communicator):
    """The collectives, by copying."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place."""
        assert x.is_contiguous()
        return x.copy_(torch.stack(self._meeting.exchange(self.rank, x)).float().sum(0))

    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """Equal shapes only: what the decoder relies on."""
        assert x.is_contiguous()
        parts = self._meeting.exchange(self.rank, x)
        assert len({part.shape for part in parts}) == 1
        return parts if self.rank == 0 else None

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's."""
        return x.copy_(self._meeting.exchange(self.rank, x)[0])

    def close(self) -> None:
        """Nothing is open."""


def run_rank_threads(size: int, function: Callable[[Communicator], R]) -> list[R]:
    """`function(communicator)` on every rank at once; the results in rank order."""
    meeting = Meeting(size)
    ranks = [ThreadCommunicator(rank, size, meeting) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, ranks))
