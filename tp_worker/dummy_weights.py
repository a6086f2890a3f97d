"""Seeded random weights for `--load-format dummy`: the same numbers whatever the number of ranks."""

import hashlib

import torch

from ..common.tensor_parallel import TensorShard
from .tensor_source import TensorSource

STANDARD_DEVIATION = 0.02


class DummySource(TensorSource):
    """Norms are 1, everything else is normal noise keyed by the tensor's name and the seed."""

    source = "dummy weights"

    def __init__(self, shards: dict[str, TensorShard], seed: int) -> None:
        self._shapes = {name: shard.shape for name, shard in shards.items()}
        self._seed = seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What the config asks for."""
        return self._shapes

    def read_into(self, out: torch.Tensor, name: str, shard: TensorShard) -> None:
        """Draw the whole tensor, keep the shard."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        whole = torch.randn(shard.shape, generator=generator).mul_(STANDARD_DEVIATION)
        part = whole[shard.rows.start : shard.rows.end]
        out.copy_(part if shard.columns is None else part[:, shard.columns.start : shard.columns.end])

    def close(self) -> None:
        """Nothing is open."""
