"""Weights from a GGUF file, dequantised while they are read; a rank reads only its rows.

llama.cpp's conventions: q and k rows of arch llama are stored with the halves of each head interleaved (undone here),
Gemma's norms are stored with their 1 added.
"""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ..common.gguf_file import GGUFFile, GGUFTensor
from ..common.model_error import ModelError
from ..common.model_struct import ModelConfig
from ..common.tensor_parallel import TensorShard
from .tensor_source import TensorSource

CHUNK_VALUES = 2**18  # dequantised at a time, so that the temporary copies stay in cache
ROPE_FACTORS = "rope_freqs.weight"
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFSource(TensorSource):
    """The tensors of one GGUF file under transformers' names."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.source = str(file.path)
        self._head_dim = config.head_dim
        self._is_interleaved = config.model_type == "llama"
        layer_names = GEMMA_NAMES if config.model_type == "gemma3" else LAYER_NAMES
        self._tensors = {_hf_name(name, layer_names): tensor for name, tensor in file.tensors.items()}
        self._rope_factors = self._tensors.pop(ROPE_FACTORS, None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """From the file's tensor table."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_into(self, out: torch.Tensor, name: str, shard: TensorShard) -> None:
        """Dequantise these rows, then keep these columns."""
        tensor = self._tensors[name]
        if shard.columns is None:
            out.copy_(_dequantize(tensor, 0, 1)[0, shard.rows.start : shard.rows.end])
        else:
            columns = slice(shard.columns.start, shard.columns.end)
            step = max(1, CHUNK_VALUES // tensor.shape[1])
            for start in range(shard.rows.start, shard.rows.end, step):
                end = min(start + step, shard.rows.end)
                rows = slice(start - shard.rows.start, end - shard.rows.start)
                out[rows] = _dequantize(tensor, start, end)[:, columns]
        if self._is_interleaved and (".q_proj." in name or ".k_proj." in name):
            out.copy_(_undo_interleaving(out, self._head_dim))

    def rope_factors(self) -> torch.Tensor | None:
        """The tensor rope_freqs.weight."""
        if self._rope_factors is None:
            return None
        if self._rope_factors.shape != (self._head_dim // 2,):
            raise ModelError(f"{self.source}: tensor {ROPE_FACTORS} has the wrong shape {self._rope_factors.shape}")
        factors = _dequantize(self._rope_factors, 0, 1)[0]
        if not bool((factors > 0).all()):
            raise ModelError(f"{self.source}: tensor {ROPE_FACTORS} holds values that are not positive")
        return factors

    def close(self) -> None:
        """Let go of the map."""
        self._tensors.clear()
        self._rope_factors = None


def _hf_name(name: str, layer_names: dict[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names without a counterpart stay."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    return name


def _dequantize(tensor: GGUFTensor, start: int, end: int) -> torch.Tensor:
    """float32 [end - start, columns]: rows of a matrix (a vector is one row)."""
    data = tensor.data[start * tensor.row_bytes : end * tensor.row_bytes]
    raw = np.frombuffer(data, dtype=np.uint8)[None]  # one long row: the gguf package loops over groups of rows
    with np.errstate(all="ignore"):  # damaged scales give infinities, which end as failed rows and not as warnings
        values = dequantize(raw, GGMLQuantizationType(tensor.type.type_id))
    return torch.from_numpy(values if values.flags.writeable else values.copy()).view(end - start, -1)


def _undo_interleaving(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from (0, h, 1, h + 1 ...) back to halves (0, 1 ..., h, h + 1 ...), h = head_dim / 2."""
    return x.view(-1, head_dim // 2, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
