"""A linear layer as the decoder calls it: the copy of its weight that is fastest for the number of rows.

T tokens, K input features, N output features.
"""

import torch

from ..kernels.linear import DenseWeight, linear_dense
from ..kernels.linear_int4 import Int4Weight, linear_int4
from ..kernels.linear_int8 import Int8Weight, linear_int8
from ..kernels.linear_w8a8 import W8A8Weight, linear_w8a8

QuantisedWeight = Int4Weight | Int8Weight | W8A8Weight
Weight = DenseWeight | QuantisedWeight

# Up to so many rows reading the weight takes longer than multiplying, and the quantised copy is the faster one.
MAX_QUANTISED_ROWS = {Int4Weight: 12, Int8Weight: 4}


class LinearLayer:
    """y = x W^T + b from a dense copy of the weight, a quantised one, or both."""

    def __init__(self, dense: DenseWeight | None = None, quantised: QuantisedWeight | None = None) -> None:
        copies = [copy for copy in (quantised, dense) if copy is not None]
        self._few_rows, self._many_rows = copies[0], copies[-1]
        self._max_few_rows = MAX_QUANTISED_ROWS.get(type(self._few_rows), 0)
        self.out_features, self.in_features = copies[0].out_features, copies[0].in_features
        self.num_bytes = sum(copy.num_bytes for copy in copies)

    def __call__(self, x_TK: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, K] (or any leading shape) to [T, N], in x's type or `out_dtype`."""
        return _multiply(x_TK, self.weight_for(x_TK.numel() // self.in_features), out_dtype or x_TK.dtype)

    def weight_for(self, num_rows: int) -> Weight:
        """The copy that serves a step of so many rows."""
        return self._few_rows if num_rows <= self._max_few_rows else self._many_rows


def _multiply(x_TK: torch.Tensor, weight: Weight, out_dtype: torch.dtype) -> torch.Tensor:
    match weight:
        case Int4Weight():
            return linear_int4(x_TK, weight, out_dtype)
        case Int8Weight():
            return linear_int8(x_TK, weight, out_dtype)
        case W8A8Weight():
            return linear_w8a8(x_TK, weight, out_dtype)
        case _:
            return linear_dense(x_TK, weight, out_dtype)
