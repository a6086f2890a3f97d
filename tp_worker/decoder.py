"""The one decoder of all model families: what differs between them comes from ModelConfig and the weights.

T tokens, R requests, S rows that sample, N tokens whose hidden states are wanted, F hidden size, H query heads and G KV
heads of this rank, D head dim, V vocabulary. The residual stream is one tensor, added to in place; every rank holds all
of it. Between `_compute` and its end stand operators of the catalogue alone, so that a step can be recorded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..common.model_struct import SLIDING_ATTENTION, ModelConfig
from ..kernels.activation import gelu_tanh_and_mul, silu_and_mul
from ..kernels.attention import decode_attention, extend_attention
from ..kernels.embedding import embed, select_rows
from ..kernels.kv_cache import KVCache, alloc_kv_cache, page_bytes
from ..kernels.rms_norm import add_rms_norm, rms_norm
from ..kernels.rotary import rotary_and_store
from .communicator import Communicator
from .decoder_graphs import DecoderGraphs
from .forward_batch import ForwardBatch
from .rope import Rope
from .weights import LayerWeights, Weights

CosSin = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


class ForwardOutput(NamedTuple):
    """What a step gives; good until the next call. `logits_SV`: float32, on rank 0 alone.

    `hidden_NF`: the states of `hidden_indices_N` after the final norm, on every rank; None where none are wanted.
    """

    logits_SV: torch.Tensor | None
    hidden_NF: torch.Tensor | None


class Decoder:
    """This rank's part of the model. `kv_caches` (one a layer) is empty until `alloc_kv_caches`."""

    def __init__(self, config: ModelConfig, weights: Weights, communicator: Communicator) -> None:
        self.config = config
        self.kv_caches: list[KVCache] = []
        self._weights = weights
        self._communicator = communicator
        self._layers = [
            _Layer(config, weights, layer, kind == SLIDING_ATTENTION, communicator)
            for layer, kind in zip(weights.layers, config.layer_types, strict=True)
        ]
        self._rope = Rope(config.rope, config.head_dim, weights.device, weights.rope_factors)
        self._local_rope = config.local_rope and Rope(config.local_rope, config.head_dim, weights.device)
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=weights.dtype))
        self._graphs = DecoderGraphs(self._compute, communicator)

    def kv_page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers of this rank."""
        num_kv_heads = self._weights.plan.kv_heads.size
        return self.config.num_layers * page_bytes(page_size, num_kv_heads, self.config.head_dim, self._weights.dtype)

    def alloc_kv_caches(self, num_pages: int, page_size: int) -> None:
        """Make `kv_caches`: `num_pages` pages of `page_size` tokens for every layer, in the weights' dtype."""
        weights, head_dim = self._weights, self.config.head_dim
        num_kv_heads = weights.plan.kv_heads.size
        self._graphs = DecoderGraphs(self._compute, self._communicator)  # older ones hold the addresses of older caches
        self.kv_caches = [
            alloc_kv_cache(num_pages, page_size, num_kv_heads, head_dim, weights.dtype, weights.device)
            for _ in self._layers
        ]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Compute the step's tokens, and write their keys and values."""
        if batch.hidden_indices_N is None:
            return ForwardOutput(self._joined(self._graphs.run(batch)), None)
        x_TF, residual_TF = self._run_layers(batch)
        hidden_NF = self._hidden(x_TF, residual_TF, batch.hidden_indices_N)
        return ForwardOutput(self._joined(self._logits(x_TF, residual_TF, batch.logits_indices_S)), hidden_NF)

    @torch.inference_mode()
    def logits(self, hidden_NF: torch.Tensor) -> torch.Tensor | None:
        """Of hidden states, in this rank's part of a collective: float32 [N, V] on rank 0, good until the next call."""
        return self._joined(self._gather_logits(hidden_NF))

    def _joined(self, parts: list[torch.Tensor] | None) -> torch.Tensor | None:
        """The logits of each rank's part of the vocabulary as one, capped; None stays None."""
        vocab_size = self.config.vocab_size
        if parts is None:
            return None
        if not parts:
            return torch.empty((0, vocab_size), device=self._weights.device)
        logits_SV = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))[:, :vocab_size]
        cap = self.config.final_soft_cap
        return logits_SV if cap is None else torch.tanh(logits_SV / cap) * cap

    def _compute(self, batch: ForwardBatch) -> list[torch.Tensor] | None:
        """On rank 0 each rank's columns of the logits, float32 (none where no row samples); operators alone."""
        return self._logits(*self._run_layers(batch), batch.logits_indices_S)

    def _run_layers(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last layer's MLP adds to the residual, and the residual."""
        x_TF = self._embed(batch.token_ids_T)
        rope = self._rope(batch.positions_T)
        local_rope = self._local_rope(batch.positions_T) if self._local_rope else rope
        residual_TF = None
        for layer, cache in zip(self._layers, self.kv_caches, strict=True):
            x_TF, residual_TF = layer(x_TF, residual_TF, batch, local_rope if layer.is_sliding else rope, cache)
        assert residual_TF is not None
        return x_TF, residual_TF

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        plan = self._weights.plan
        x_TF = embed(token_ids_T, self._weights.embed_tokens_VF, plan.vocab.start, self._embed_scale)
        return x_TF if plan.tp_size == 1 else self._communicator.all_reduce(x_TF)

    def _logits(
        self, x_TF: torch.Tensor, residual_TF: torch.Tensor, indices_S: torch.Tensor
    ) -> list[torch.Tensor] | None:
        if indices_S.numel() == 0:
            return [] if self._communicator.rank == 0 else None
        if indices_S.numel() < x_TF.shape[0]:
            x_TF, residual_TF = select_rows(x_TF, indices_S), select_rows(residual_TF, indices_S)
        x_SF = add_rms_norm(x_TF, residual_TF, self._weights.norm_F, self.config.rms_norm_eps)
        return self._gather_logits(x_SF)

    def _hidden(self, x_TF: torch.Tensor, residual_TF: torch.Tensor, indices_N: torch.Tensor) -> torch.Tensor:
        x_NF, residual_NF = select_rows(x_TF, indices_N), select_rows(residual_TF, indices_N)
        return add_rms_norm(x_NF, residual_NF, self._weights.norm_F, self.config.rms_norm_eps)

    def _gather_logits(self, x_SF: torch.Tensor) -> list[torch.Tensor] | None:
        return self._communicator.gather_to_first(self._weights.lm_head(x_SF, torch.float32))


class _Layer:
    """Attention and MLP of one layer."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: LayerWeights, is_sliding: bool, communicator: Communicator
    ) -> None:
        plan, head_dim = weights.plan, config.head_dim
        self.is_sliding = is_sliding
        self._weights = layer
        self._communicator = communicator
        self._is_alone = plan.tp_size == 1
        self._eps = config.rms_norm_eps
        self._head_dim = head_dim
        self._head_splits = [plan.heads.size, plan.kv_heads.size, plan.kv_heads.size]
        self._scale = config.attention_scale
        self._sliding_window = config.sliding_window if is_sliding else None
        self._soft_cap = config.attention_soft_cap
        self._activation = ACTIVATIONS[config.hidden_act]

    def __call__(
        self,
        x_TF: torch.Tensor,
        residual_TF: torch.Tensor | None,
        batch: ForwardBatch,
        rope: CosSin,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what this layer's MLP adds to the residual, the residual); the first layer's input is the residual."""
        weights, eps = self._weights, self._eps
        if residual_TF is None:
            residual_TF = x_TF
            x_TF = rms_norm(x_TF, weights.attention_norm_F, eps)
        else:
            x_TF = add_rms_norm(x_TF, residual_TF, weights.attention_norm_F, eps)
        x_TF = self._reduce(self._attention(x_TF, batch, rope, cache))
        if weights.attention_out_norm_F is not None:
            x_TF = rms_norm(x_TF, weights.attention_out_norm_F, eps)
        x_TF = add_rms_norm(x_TF, residual_TF, weights.mlp_norm_F, eps)
        x_TF = self._reduce(weights.down(self._activation(weights.gate_up(x_TF))))
        if weights.mlp_out_norm_F is not None:
            x_TF = rms_norm(x_TF, weights.mlp_out_norm_F, eps)
        return x_TF, residual_TF

    def _attention(self, x_TF: torch.Tensor, batch: ForwardBatch, rope: CosSin, cache: KVCache) -> torch.Tensor:
        weights = self._weights
        qkv_TND = weights.qkv(x_TF).view(x_TF.shape[0], -1, self._head_dim)
        q_THD, k_TGD, v_TGD = qkv_TND.split_with_sizes(self._head_splits, 1)
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            q_THD = rms_norm(q_THD, weights.q_norm_D, self._eps)
            k_TGD = rms_norm(k_TGD, weights.k_norm_D, self._eps)
        rotary_and_store(q_THD, k_TGD, v_TGD, *rope, cache, batch.page_table_RP, batch.row_of_T, batch.positions_T)
        return weights.o(self._attend(q_THD, batch, cache).view(x_TF.shape[0], -1))

    def _attend(self, q_THD: torch.Tensor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        scale, window, cap = self._scale, self._sliding_window, self._soft_cap
        tables, kv_lens = batch.page_table_RP, batch.kv_lens_R
        if batch.is_decode:
            return decode_attention(q_THD, cache, tables, kv_lens, scale=scale, sliding_window=window, soft_cap=cap)
        return extend_attention(
            q_THD, cache, tables, batch.query_starts, kv_lens, scale=scale, sliding_window=window, soft_cap=cap
        )

    def _reduce(self, x_TF: torch.Tensor) -> torch.Tensor:
        return x_TF if self._is_alone else self._communicator.all_reduce(x_TF)
