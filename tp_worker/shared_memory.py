"""Collectives over memory that the ranks of one host share: an inherited memfd, which has no name to be left behind."""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from ..kernels.collectives import PeerError, memory_bytes, open_collectives, peer_error
from ..kernels.graph import NotRecordable, recording
from ..kernels.native import OperatorError
from .communicator import Communicator, CommunicatorError, gathered_shapes

SLOT_BYTES = 2**20
P = ParamSpec("P")
R = TypeVar("R")


class SharedMemoryCommunicator(Communicator):
    """Maps the memory behind `descriptor`, which it takes over and closes; whoever comes first gives it its size.

    `timeout` is in seconds: a peer that is later than that has failed, and CommunicatorError names it.
    """

    def __init__(
        self, rank: int, size: int, descriptor: int, *, timeout: float = 300.0, slot_bytes: int = SLOT_BYTES
    ) -> None:
        super().__init__(rank, size)
        total = memory_bytes(size, slot_bytes)
        os.ftruncate(descriptor, total)  # new bytes are zero; to the same size it changes nothing
        memory = mmap.mmap(descriptor, total)
        os.close(descriptor)  # the mapping stays
        self._collectives = open_collectives(memory, rank, size, slot_bytes, timeout)

    @property
    def is_recordable(self) -> bool:
        """With the C version, and but for float16."""
        return self._collectives.is_recordable

    def explain(self, error: OperatorError) -> Exception:
        """CommunicatorError where a peer is to blame."""
        peer = peer_error(error.code)
        return error if peer is None else self._blame(peer)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, the same bits on every rank."""
        if x.dtype == torch.float16:
            if recording() is not None:
                raise NotRecordable("float16 is summed as float32 by torch")
            return x.copy_(self.all_reduce(x.float()))
        self._run(self._collectives.all_reduce, x)
        return x

    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """Every rank's tensor on rank 0."""
        return self._run(self._collectives.gather, x, gathered_shapes(x, self.size, widths))

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values."""
        self._run(self._collectives.broadcast, x)
        return x

    def close(self) -> None:
        """The mapping goes with the process or the last tensor over it."""

    def _run(self, collective: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return collective(*args, **kwargs)
        except PeerError as error:
            raise self._blame(error) from error

    def _blame(self, error: PeerError) -> CommunicatorError:
        return CommunicatorError(f"tensor-parallel rank {self.rank}: {error}")
