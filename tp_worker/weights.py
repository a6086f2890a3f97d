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
from ..common.weight_plan import AUTO, LinearPlan, plan_linears, rank_bytes
from .dummy_weights import DummySource
from .gguf_weights import GGUFSource
from .linear_layer import LinearLayer
from .linear_loader import LinearLoader
from .safetensors_weights import SafetensorsSource
from .tensor_source import TensorSource, check_tensors

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `..._out_norm` stand behind attention and MLP (Gemma 3), the other norms before them."""

    attention_norm_F: torch.Tensor
    qkv: LinearLayer
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    o: LinearLayer
    attention_out_norm_F: torch.Tensor | None
    mlp_norm_F: torch.Tensor
    gate_up: LinearLayer
    down: LinearLayer
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
    lm_head: LinearLayer
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
    quantization: str = AUTO,
    keeps_dense: bool = True,
    seed: int = 0,
) -> Weights:
    """Read this rank's slices of the model at `path` in `dtype`. `seed` is that of dummy weights.

    `quantization` is what the flag says; `keeps_dense` gives layers with a quantised copy a dense one too.

    `on_progress(loaded_bytes, total_bytes)` is called after each layer, in bytes of this rank's weights.
    Raises ModelError for damaged files, missing, unexpected or misshapen tensors, and a tp_size that does not fit.
    """
    plan = shard_plan(config, rank, tp_size)
    shards = tensor_shards(config, plan)
    source = _open_source(path, config, load_format, shards, seed)
    try:
        check_tensors(source, shards)
        device = torch.device(device)
        linears = plan_linears(config, plan, quantization)
        total_bytes = rank_bytes(config, plan, linears.values(), dtype.itemsize, keeps_dense)
        report = _Progress(on_progress, total_bytes)
        linear_loader = LinearLoader(source, shards, config.head_dim, dtype, device, keeps_dense)
        return _Loader(source, config, plan, shards, dtype, device, linears, linear_loader, report).load()
    finally:
        source.close()


def _open_source(
    path: Path, config: ModelConfig, load_format: str, shards: dict[str, TensorShard], seed: int
) -> TensorSource:
    if load_format == "dummy":
        return DummySource(shards, seed)
    gguf_path = find_gguf_file(path, load_format)
    return SafetensorsSource(path, config) if gguf_path is None else GGUFSource(GGUFFile(gguf_path), config)


class _Progress:
    """Bytes in memory, counted and told."""

    def __init__(self, on_progress: OnProgress, total_bytes: int) -> None:
        self.num_bytes = 0
        self._on_progress = on_progress
        self._total_bytes = total_bytes

    def add(self, x: torch.Tensor | LinearLayer) -> None:
        """One thing more is there."""
        self.num_bytes += x.num_bytes if isinstance(x, LinearLayer) else x.numel() * x.element_size()

    def tell(self, *, is_end: bool = False) -> None:
        """The end is what is there, padding of packed rows included."""
        self._on_progress(self.num_bytes, self.num_bytes if is_end else max(self.num_bytes, self._total_bytes))


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
        linears: dict[str, LinearPlan],
        linear_loader: LinearLoader,
        progress: _Progress,
    ) -> None:
        self._source = source
        self._config = config
        self._plan = plan
        self._shards = shards
        self._dtype = dtype
        self._device = device
        self._linears = linears
        self._linear_loader = linear_loader
        self._progress = progress

    def load(self) -> Weights:
        """Everything, top to bottom."""
        embed_tokens = self._table("model.embed_tokens.weight")
        lm_head = self._load_linear("model.embed_tokens" if self._config.tie_word_embeddings else "lm_head")
        layers = []
        for index in range(self._config.num_layers):
            layers.append(self._layer(f"model.layers.{index}."))
            self._progress.tell()
        norm = self._norm("model.norm.weight")
        self._progress.tell(is_end=True)
        return Weights(
            plan=self._plan,
            dtype=self._dtype,
            device=self._device,
            embed_tokens_VF=embed_tokens,
            layers=layers,
            norm_F=norm,
            lm_head=lm_head,
            rope_factors=self._source.rope_factors(),
            num_bytes=self._progress.num_bytes,
        )

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

    def _linear(self, *names: str) -> LinearLayer:
        """Layers that read the same input, as one."""
        has_bias = f"{names[0]}.bias" in self._shards
        return self._load_linear(names[0], self._bias(*names) if has_bias else None)

    def _summed_linear(self, name: str) -> LinearLayer:
        """A layer whose outputs are summed over the ranks: the bias is added by the first alone."""
        has_bias = f"{name}.bias" in self._shards and self._plan.rank == 0
        return self._load_linear(name, self._bias(name) if has_bias else None)

    def _load_linear(self, name: str, bias_N: torch.Tensor | None = None) -> LinearLayer:
        layer = self._linear_loader.load(self._linears[f"{name}.weight"], bias_N)
        self._progress.add(layer)
        return layer

    def _bias(self, *names: str) -> torch.Tensor:
        """The biases of fused layers, one behind the other."""
        return torch.cat([self._read(f"{name}.bias", self._dtype) for name in names]).to(self._device)

    def _table(self, name: str) -> torch.Tensor:
        """Vocabulary rows of this rank, padded to what every rank has."""
        shard = self._shards[name]
        table = torch.zeros((self._plan.padded_vocab, self._config.hidden_size), dtype=self._dtype)
        if shard.rows.size:
            self._source.read_into(table[: shard.rows.size], name, shard)
        self._progress.add(table)
        return table.to(self._device)

    def _norm(self, name: str) -> torch.Tensor:
        """Norm weights; Gemma's stay in float32, because 1 + w would lose most of w in bfloat16."""
        norm = self._read(name, torch.float32 if self._config.post_norms else self._dtype)
        self._progress.add(norm)
        return norm.add_(self._source.norm_offset).to(self._device)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self._shards[name].local_shape, dtype=dtype)
        self._source.read_into(out, name, self._shards[name])
        return out
