"""Collectives over NCCL, for CUDA: the only module that calls it."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .communicator import Communicator, gathered_shapes

dist: Any = torch.distributed  # its bindings carry no types


class NcclCommunicator(Communicator):
    """The ranks find each other through `store_file`; collectives run on the device's current stream."""

    def __init__(self, rank: int, size: int, store_file: Path, device: torch.device, *, timeout: float = 300.0) -> None:
        super().__init__(rank, size)
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(str(store_file), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, the same bits on every rank; NCCL rounds partial sums to x's dtype where there are over two."""
        dist.all_reduce(x)
        return x

    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """Every rank's tensor on rank 0, sent point to point because widths may differ."""
        outs = [x]
        if self.rank:
            transfers = [dist.P2POp(dist.isend, x, 0)]
        else:
            outs += [x.new_empty(shape) for shape in gathered_shapes(x, self.size, widths)[1:]]
            transfers = [dist.P2POp(dist.irecv, outs[peer], peer) for peer in range(1, self.size)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        return None if self.rank else outs

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values."""
        dist.broadcast(x, 0)
        return x

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
