"""Matrix products with weights that are packed once for the CPU's matrix library.

T tokens, K input features, N output features.
"""

import torch


class PackedLinear:
    """y = x W^T + b. On CPU in bf16 the weight is kept in oneDNN's blocked form only: up to twice as fast at few tokens."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self.bias_N = bias_N
        self.is_packed = can_pack(weight_NK)
        self._weight = pack(weight_NK) if self.is_packed else weight_NK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] (or any leading shape) to [T, N]."""
        if x_TK.numel() == 0:
            return x_TK.new_empty((*x_TK.shape[:-1], self.out_features))
        if self.is_packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self._weight, self.bias_N, "none", [], "")
            return out
        return torch.nn.functional.linear(x_TK, self._weight, self.bias_N)


def can_pack(weight_NK: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this weight in its packed form here."""
    return (
        weight_NK.device.type == "cpu"
        and weight_NK.dtype == torch.bfloat16
        and weight_NK.numel() > 0
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's blocked form (an opaque tensor)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
    return packed
