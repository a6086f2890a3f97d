"""Collectives over torch.distributed's gloo: the fallback on CPU, where `--disable-custom-all-reduce` asks for it."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .communicator import Communicator, CommunicatorError, gathered_shapes

dist: Any = torch.distributed  # its bindings carry no types


class GlooCommunicator(Communicator):
    """The ranks find each other through `store_file`, and talk on loopback. `timeout` (s) bounds every wait for a peer."""

    def __init__(self, rank: int, size: int, store_file: Path, *, timeout: float = 300.0) -> None:
        super().__init__(rank, size)
        limit = timedelta(seconds=timeout)
        store = dist.FileStore(str(store_file), size)
        store.set_timeout(limit)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum; half precision travels as float32."""
        if x.dtype != torch.float32:
            return x.copy_(self.all_reduce(x.float()))
        self._wait(self._group.allreduce([x]))
        return x

    def gather_to_first(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> list[torch.Tensor] | None:
        """Every rank's tensor on rank 0, sent point to point because widths may differ."""
        if self.rank:
            self._wait(self._group.send([x], 0, self.rank))
            return None
        shapes = gathered_shapes(x, self.size, widths)
        outs = [x, *(x.new_empty(shape) for shape in shapes[1:])]
        for work in [self._group.recv([outs[peer]], peer, peer) for peer in range(1, self.size)]:
            self._wait(work)
        return outs

    def broadcast_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values."""
        self._wait(self._group.broadcast(x, 0))
        return x

    def close(self) -> None:
        """Let go of the connections."""
        del self._group

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CommunicatorError(f"tensor-parallel rank {self.rank}: gloo: {error}") from error
