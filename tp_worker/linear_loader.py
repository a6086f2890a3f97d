"""Reads linear layers in the forms that the weight plan chose.

N output features, K input features.
"""

from collections.abc import Iterator, Mapping

import torch

from ..common.tensor_parallel import Range, TensorShard
from ..common.weight_plan import DENSE, INT4, W8A8, LinearPlan
from ..kernels.linear import pack_dense
from ..kernels.linear_int4 import pack_int4
from ..kernels.linear_int8 import pack_int8
from ..kernels.linear_w8a8 import pack_w8a8, rotate, rotate_weight
from ..kernels.weight_panels import vector_lanes
from .linear_layer import LinearLayer
from .quantise import QuantisedTensor, quantise_int4, quantise_int8, quantise_rows, stack
from .tensor_source import TensorSource

CHUNK_VALUES = 2**23  # read in float32 at a time, to be quantised


class LinearLoader:
    """Makes layers of one rank.

    Quantised copies need C code. Without a compiler none is planned; where the code does not build, layers are dense in
    the same values.
    """

    def __init__(
        self,
        source: TensorSource,
        shards: Mapping[str, TensorShard],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps_dense: bool,
    ) -> None:
        self._source = source
        self._shards = shards
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._keeps_dense = keeps_dense
        self._can_quantise = vector_lanes(dtype, device) is not None

    def load(self, plan: LinearPlan, bias_N: torch.Tensor | None = None) -> LinearLayer:
        """The layer of a plan. One that holds no rows, or values that float16 offsets cannot give, is dense."""
        if plan.format == DENSE:
            return self._load_dense(plan, bias_N)
        if plan.format == W8A8:
            return self._load_w8a8(plan, bias_N)
        tensor = self._read_stored(plan) if plan.is_stored else self._quantise(plan)
        if tensor is None:
            return self._load_dense(plan, bias_N)
        if not self._can_quantise:
            return self._make_dense(tensor.dequantise(self._dtype), bias_N)
        dense = pack_dense(tensor.dequantise(self._dtype), bias_N) if self._keeps_dense else None
        if tensor.m_NG is not None:
            return LinearLayer(dense, pack_int4(tensor.q_NK, tensor.d_NG, tensor.m_NG, bias_N))
        return LinearLayer(dense, pack_int8(tensor.q_NK, tensor.d_NG, bias_N))

    def _load_dense(self, plan: LinearPlan, bias_N: torch.Tensor | None) -> LinearLayer:
        weight_NK = torch.zeros((plan.num_rows, plan.num_columns), dtype=self._dtype)
        start = 0
        for name in plan.names:
            shard = self._shards[name]
            if shard.rows.size:
                self._source.read_into(weight_NK[start : start + shard.rows.size], name, shard)
            start += shard.rows.size
        return self._make_dense(weight_NK, bias_N)

    def _load_w8a8(self, plan: LinearPlan, bias_N: torch.Tensor | None) -> LinearLayer:
        q_NK = torch.zeros((plan.num_rows, plan.num_columns), dtype=torch.int8)
        scale_N = torch.zeros(plan.num_rows)
        for start, piece in self._pieces(plan):
            rows = slice(start, start + len(piece))
            q_NK[rows], scale_N[rows] = quantise_rows(rotate_weight(piece))
        if not self._can_quantise:
            return self._make_dense(rotate(q_NK * scale_N[:, None]).to(self._dtype), bias_N)
        return LinearLayer(None, pack_w8a8(q_NK, scale_N, bias_N))

    def _make_dense(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> LinearLayer:
        return LinearLayer(pack_dense(weight_NK.to(self._device), bias_N))

    def _read_stored(self, plan: LinearPlan) -> QuantisedTensor | None:
        names = [name for name in plan.names if self._shards[name].rows.size]
        tensors = [self._source.read_quantised(name, self._shards[name]) for name in names]
        found = [tensor for tensor in tensors if tensor is not None]
        return stack(found, plan.num_rows) if found and len(found) == len(tensors) else None

    def _quantise(self, plan: LinearPlan) -> QuantisedTensor | None:
        quantise = quantise_int4 if plan.format == INT4 else quantise_int8
        tensors = [quantise(piece) for _, piece in self._pieces(plan)]
        return stack(tensors, plan.num_rows) if tensors else None

    def _pieces(self, plan: LinearPlan) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float32 rows of the layer), top to bottom, in whole heads."""
        first = 0
        for name in plan.names:
            shard = self._shards[name]
            step = max(1, CHUNK_VALUES // plan.num_columns // self._head_dim) * self._head_dim
            for start in range(shard.rows.start, shard.rows.end, step):
                rows = Range(start, min(start + step, shard.rows.end))
                piece = torch.empty(rows.size, plan.num_columns)
                self._source.read_into(piece, name, TensorShard(shard.shape, rows, shard.columns))
                yield first, piece
                first += rows.size
