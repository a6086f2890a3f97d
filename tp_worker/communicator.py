"""What the ranks of one model say to each other: three collectives, each entered by all ranks in the same order.

The single-rank version is here; `shared_memory.py` (CPU), `gloo.py` (CPU, fallback) and `nccl.py` (CUDA) are the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..kernels.native import OperatorError


class CommunicatorError(RuntimeError):
    """A peer did not arrive in time, or the ranks do not agree on a payload; the server must end."""


class Communicator(ABC):
    """Collectives between `size` ranks; this one is `rank`. Tensors are contiguous."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks")
        self.rank = rank
        self.size = size

    @property
    def is_recordable(self) -> bool:
        """Whether these collectives can be recorded into a graph of C operators (kernels/graph.py)."""
        return False

    def explain(self, error: OperatorError) -> Exception:
        """What the failure of a recorded step means."""
        return error

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns x. float32, bfloat16 or float16, summed in float32.

        Every rank obtains the same bits.
        """

    @abstractmethod
    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """On rank 0 every rank's tensor, in rank order; None on the others.

        Shapes are the same but for the last dimension, which is `widths[rank]` where it differs between ranks. While a
        graph records, the others' tensors are of its memory.
        """

    @abstractmethod
    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place on the others; returns x. Any dtype."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what connects the ranks."""


class SingleCommunicator(Communicator):
    """One rank has nobody to talk to."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @property
    def is_recordable(self) -> bool:
        """There is nothing to record."""
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over one rank."""
        return x

    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """The one rank's tensor."""
        return [x]

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Already there."""
        return x

    def close(self) -> None:
        """Nothing to let go of."""


def gathered_shapes(x: torch.Tensor, size: int, widths: Sequence[int] | None) -> list[tuple[int, ...]]:
    """The shape of every rank's tensor in `gather_to_first`."""
    if widths is None:
        return [tuple(x.shape)] * size
    if len(widths) != size:
        raise ValueError(f"{len(widths)} widths for {size} ranks")
    return [(*x.shape[:-1], width) for width in widths]
