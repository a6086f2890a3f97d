"""The weights of one rank, as the decoder wants them: fused, packed, on the device.

N output features, K input features, V vocabulary rows of this rank, F hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.gguf_file import GGUFFile
from ..common.model_config import find_gguf_file
from ..common.model_struct import ModelConfig
from ..common.tensor_parallel import ShardPlan, TensorShard, shard_plan, tensor_shards
from ..kernels.linear import PackedLinear
from .dummy_weights import DummySource
from .gguf_weights import GGUFSource
from .safetensors_weights import SafetensorsSource
from .tensor_source import TensorSource, check_tensors

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `..._out_norm` stand behind attention and MLP (Gemma 3), the other norms before them."""

    attention_norm_F: torch.Tensor
    qkv: PackedLinear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    o: PackedLinear
    attention_out_norm_F: torch.Tensor | None
    mlp_norm_F: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_out_norm_F: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one rank. The embedding table and lm_head hold `plan.padded_vocab` rows, the last ones zero."""

    plan: ShardPlan
    dtype: torch.dtype
    device: torch.device
    embed_tokens_VF: torch.Tensor
    layers: list[LayerWeights]
    norm_F: torch.Tensor
    lm_head: PackedLinear
    rope_factors: torch.Tensor | None
    num_bytes: int


def load_weights(
    path: Path,
    config: ModelConfig,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device | str,
    rank: int,
    tp_size: int,
    on_progress: OnProgress,
    *,
    seed: int = 0,
) -> Weights:
    """Read this rank's slices of the model at `path` in `dtype`. `seed` is that of dummy weights.

    `on_progress(loaded_bytes, total_bytes)` is called after each layer, in bytes of this rank's weights in memory.
    Raises ModelError for damaged files, missing, unexpected or misshapen tensors, and a tp_size that does not fit.
    """
    plan = shard_plan(config, rank, tp_size)
    shards = tensor_shards(config, plan)
    source = _open_source(path, config, load_format, shards, seed)
    try:
        check_tensors(source, shards)
        return _Loader(source, config, plan, shards, dtype, torch.device(device), on_progress).load()
    finally:
        source.close()


def _open_source(
    path: Path, config: ModelConfig, load_format: str, shards: dict[str, TensorShard], seed: int
) -> TensorSource:
    if load_format == "dummy":
        return DummySource(shards, seed)
    gguf_path = find_gguf_file(path, load_format)
    return SafetensorsSource(path, config) if gguf_path is None else GGUFSource(GGUFFile(gguf_path), config)


class _Loader:
    """Reads tensors one layer at a time and fuses, packs and moves them."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        plan: ShardPlan,
        shards: dict[str, TensorShard],
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
    ) -> None:
        self._source = source
        self._config = config
        self._plan = plan
        self._shards = shards
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._loaded_bytes = 0
        self._total_bytes = sum(_num_values(shard) for shard in shards.values()) * dtype.itemsize

    def load(self) -> Weights:
        """Everything, top to bottom."""
        embed_tokens = self._table("model.embed_tokens.weight")
        tied = self._config.tie_word_embeddings
        lm_head = PackedLinear(embed_tokens if tied else self._table("lm_head.weight"))
        layers = []
        for index in range(self._config.num_layers):
            layers.append(self._layer(f"model.layers.{index}."))
            self._on_progress(self._loaded_bytes, self._total_bytes)
        weights = Weights(
            plan=self._plan,
            dtype=self._dtype,
            device=self._device,
            embed_tokens_VF=embed_tokens,
            layers=layers,
            norm_F=self._norm("model.norm.weight"),
            lm_head=lm_head,
            rope_factors=self._source.rope_factors(),
            num_bytes=self._total_bytes,
        )
        self._on_progress(self._loaded_bytes, self._total_bytes)
        return weights

    def _layer(self, prefix: str) -> LayerWeights:
        qk_norm, post_norms = self._config.qk_norm, self._config.post_norms
        mlp_norm = "pre_feedforward_layernorm" if post_norms else "post_attention_layernorm"
        return LayerWeights(
            attention_norm_F=self._norm(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(*(f"{prefix}self_attn.{part}_proj" for part in "qkv")),
            q_norm_D=self._norm(f"{prefix}self_attn.q_norm.weight") if qk_norm else None,
            k_norm_D=self._norm(f"{prefix}self_attn.k_norm.weight") if qk_norm else None,
            o=self._summed_linear(f"{prefix}self_attn.o_proj"),
            attention_out_norm_F=self._norm(f"{prefix}post_attention_layernorm.weight") if post_norms else None,
            mlp_norm_F=self._norm(f"{prefix}{mlp_norm}.weight"),
            gate_up=self._linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
            down=self._summed_linear(f"{prefix}mlp.down_proj"),
            mlp_out_norm_F=self._norm(f"{prefix}post_feedforward_layernorm.weight") if post_norms else None,
        )

    def _linear(self, *names: str) -> PackedLinear:
        """Layers that read the same input, as one."""
        has_bias = f"{names[0]}.bias" in self._shards
        weight = self._fused([f"{name}.weight" for name in names])
        return PackedLinear(weight, self._fused([f"{name}.bias" for name in names]) if has_bias else None)

    def _summed_linear(self, name: str) -> PackedLinear:
        """A layer whose outputs are summed over the ranks: the bias is added by the first alone."""
        weight = self._fused([f"{name}.weight"])
        bias = self._fused([f"{name}.bias"]) if f"{name}.bias" in self._shards else None
        return PackedLinear(weight, bias if self._plan.rank == 0 else None)

    def _fused(self, names: list[str]) -> torch.Tensor:
        """The shards of tensors with the same columns, one below the other."""
        shards = [self._shards[name] for name in names]
        num_rows = sum(shard.rows.size for shard in shards)
        fused = torch.empty((num_rows, *shards[0].local_shape[1:]), dtype=self._dtype)
        start = 0
        for name, shard in zip(names, shards, strict=True):
            self._read_into(fused[start : start + shard.rows.size], name)
            start += shard.rows.size
        return fused.to(self._device)

    def _table(self, name: str) -> torch.Tensor:
        """Vocabulary rows of this rank, padded to what every rank has."""
        shard = self._shards[name]
        table = torch.zeros((self._plan.padded_vocab, self._config.hidden_size), dtype=self._dtype)
        if shard.rows.size:
            self._read_into(table[: shard.rows.size], name)
        return table.to(self._device)

    def _norm(self, name: str) -> torch.Tensor:
        """Norm weights; Gemma's stay in float32, because 1 + w would lose most of w in bfloat16."""
        dtype = torch.float32 if self._config.post_norms else self._dtype
        norm = torch.empty(self._shards[name].local_shape, dtype=dtype)
        self._read_into(norm, name)
        return norm.add_(self._source.norm_offset).to(self._device)

    def _read_into(self, out: torch.Tensor, name: str) -> None:
        self._source.read_into(out, name, self._shards[name])
        self._loaded_bytes += _num_values(self._shards[name]) * self._dtype.itemsize


def _num_values(shard: TensorShard) -> int:
    return shard.rows.size * (1 if shard.columns is None else shard.columns.size)
