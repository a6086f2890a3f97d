"""Where weights come from: the interface of the readers of safetensors, GGUF and dummy weights."""

from abc import ABC, abstractmethod

import torch

from ..common.model_error import ModelError
from ..common.tensor_parallel import TensorShard
from .quantise import QuantisedTensor


class TensorSource(ABC):
    """Tensors by transformers' names (model.layers.0.self_attn.q_proj.weight ...)."""

    source: str  # what messages name
    norm_offset: float = 0.0  # what is added to norm weights (Gemma's safetensors are stored without the 1)

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that is there."""

    @abstractmethod
    def read_into(self, out: torch.Tensor, name: str, shard: TensorShard) -> None:
        """Read the rows and columns of `shard` into `out` (its local shape), cast to out's dtype."""

    def read_quantised(self, name: str, shard: TensorShard) -> QuantisedTensor | None:
        """These rows and columns as they are stored, where that is in groups of 32 columns; exact."""
        return None

    def rope_factors(self) -> torch.Tensor | None:
        """float32 [rotary_dim / 2] divisors of the rope frequencies, where the file has them."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of files."""


def check_tensors(source: TensorSource, shards: dict[str, TensorShard]) -> None:
    """Raise ModelError naming the first tensor that is missing, has another shape, or is not expected."""
    shapes = source.shapes()
    for name, shard in shards.items():
        if name not in shapes:
            raise ModelError(f"{source.source}: tensor {name} is missing")
        if shapes[name] != shard.shape:
            raise ModelError(f"{source.source}: tensor {name} has shape {shapes[name]}, expected {shard.shape}")
    unexpected = sorted(set(shapes) - set(shards))
    if unexpected:
        raise ModelError(f"{source.source}: unexpected tensor {unexpected[0]} (and {len(unexpected) - 1} more)")
