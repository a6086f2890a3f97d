"""Weights from a GGUF file, as they are stored or dequantised while they are read; a rank reads only its rows.

llama.cpp's conventions: q and k rows of arch llama are stored with the halves of each head interleaved (undone here),
Gemma's norms are stored with their 1 added.
"""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ..common.gguf_file import GGUFFile, GGUFTensor
from ..common.gguf_names import hf_name
from ..common.model_error import ModelError
from ..common.model_struct import ModelConfig
from ..common.tensor_parallel import TensorShard
from .quantise import QuantisedTensor
from .tensor_source import TensorSource

CHUNK_VALUES = 2**18  # dequantised at a time, so that the temporary copies stay in cache
ROPE_FACTORS = "rope_freqs.weight"
HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}  # float16 scale (and offset), then the values of a block


class GGUFSource(TensorSource):
    """The tensors of one GGUF file under transformers' names."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.source = str(file.path)
        self._head_dim = config.head_dim
        self._is_interleaved = config.model_type == "llama"
        self._tensors = {hf_name(name, config.model_type): tensor for name, tensor in file.tensors.items()}
        self._rope_factors = self._tensors.pop(ROPE_FACTORS, None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """From the file's tensor table."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read_into(self, out: torch.Tensor, name: str, shard: TensorShard) -> None:
        """Dequantise these rows, then keep these columns."""
        tensor = self._tensors[name]
        quantised = self.read_quantised(name, shard)
        if quantised is not None:
            quantised.dequantise_into(out)
            return
        if shard.columns is None:
            out.copy_(_dequantize(tensor, 0, 1)[0, shard.rows.start : shard.rows.end])
        else:
            columns = slice(shard.columns.start, shard.columns.end)
            step = max(1, CHUNK_VALUES // tensor.shape[1])
            for start in range(shard.rows.start, shard.rows.end, step):
                end = min(start + step, shard.rows.end)
                rows = slice(start - shard.rows.start, end - shard.rows.start)
                out[rows] = _dequantize(tensor, start, end)[:, columns]
        if self._is_rotated(name):
            out.copy_(_undo_interleaving(out, self._head_dim))

    def read_quantised(self, name: str, shard: TensorShard) -> QuantisedTensor | None:
        """Q4_0, Q4_1 and Q8_0, where columns are cut between blocks."""
        tensor = self._tensors[name]
        columns, size = shard.columns, tensor.type.block_size
        if tensor.type.name not in HEADER_BYTES or columns is None or columns.start % size or columns.end % size:
            return None
        data = tensor.data[shard.rows.start * tensor.row_bytes : shard.rows.end * tensor.row_bytes]
        blocks = np.frombuffer(data, np.uint8).reshape(shard.rows.size, -1, tensor.type.block_bytes)
        blocks = blocks[:, columns.start // size : columns.end // size]
        quantised = _read_blocks(tensor.type.name, torch.from_numpy(blocks.copy()))
        if quantised is None or not self._is_rotated(name):
            return quantised
        return quantised.move_rows(lambda x: _undo_interleaving(x, self._head_dim))

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

    def _is_rotated(self, name: str) -> bool:
        return self._is_interleaved and (".q_proj." in name or ".k_proj." in name)

    def close(self) -> None:
        """Let go of the map."""
        self._tensors.clear()
        self._rope_factors = None


def _read_blocks(kind: str, blocks_NGB: torch.Tensor) -> QuantisedTensor | None:
    """From uint8 [N, G, bytes of a block]; None where the offsets are too large for float16."""
    header = HEADER_BYTES[kind]
    scales = blocks_NGB[..., :header].contiguous().view(torch.float16)
    values, d_NG = blocks_NGB[..., header:], scales[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantisedTensor(values.flatten(1).view(torch.int8), d_NG, None)
    q_NK = torch.cat((values & 15, values >> 4), dim=-1).flatten(1)
    m_NG = scales[..., 1].contiguous() if kind == "Q4_1" else d_NG * -8  # Q4_0 is d * (q - 8)
    is_exact = kind == "Q4_1" or bool((m_NG.isfinite() | ~d_NG.isfinite()).all())
    return QuantisedTensor(q_NK, d_NG, m_NG) if is_exact else None


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
