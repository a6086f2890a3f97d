"""Weights as whole numbers: in groups of 32 inputs, as GGUF's plain types have them, or with one scale an output.

N output features, K input features, G = K / 32 groups. What is not finite stays not finite: it ends in a scale.
"""

from dataclasses import dataclass

import torch

from ..common.model_struct import QUANTISATION_GROUP

INT4_MAX, INT8_MAX = 15, 127
SHRINKS = (1.0, 0.92, 0.84)  # of a group's range: a tighter one may round the bulk better than it clips the ends
CHUNK_VALUES = 2**18  # dequantised at a time, so that the temporary copies stay in cache


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """weight = d * q + m: q uint8 0..15 (4 bits), or int8 with m None (8 bits)."""

    q_NK: torch.Tensor
    d_NG: torch.Tensor
    m_NG: torch.Tensor | None

    def dequantise_into(self, out_NK: torch.Tensor) -> None:
        """The values, exact in float32, cast to out's type."""
        num_rows, num_columns = out_NK.shape
        step = max(1, CHUNK_VALUES // max(1, num_columns))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            values = self.q_NK[rows].float().view(-1, self.d_NG.shape[1], QUANTISATION_GROUP)
            values *= self.d_NG[rows].float()[..., None]
            if self.m_NG is not None:
                values += self.m_NG[rows].float()[..., None]
            out_NK[rows] = values.view(-1, num_columns)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K]."""
        out_NK = torch.empty(self.q_NK.shape, dtype=dtype)
        self.dequantise_into(out_NK)
        return out_NK


def stack(tensors: list[QuantisedTensor], num_rows: int) -> QuantisedTensor:
    """Tensors of the same columns and bits, one below the other, and rows of zeros up to `num_rows`."""

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        missing = num_rows - sum(len(part) for part in parts)
        padding = [parts[0].new_zeros(missing, parts[0].shape[1])] if missing else []
        return torch.cat([*parts, *padding]) if len(parts) + len(padding) > 1 else parts[0]

    offsets = [each.m_NG for each in tensors if each.m_NG is not None]
    return QuantisedTensor(
        join([each.q_NK for each in tensors]),
        join([each.d_NG for each in tensors]),
        join(offsets) if offsets else None,
    )


def quantise_int8(weight_NK: torch.Tensor) -> QuantisedTensor:
    """Round to nearest, symmetric: d is the largest magnitude of a group / 127."""
    groups = weight_NK.float().unflatten(1, (-1, QUANTISATION_GROUP))
    d_NG = (groups.abs().amax(dim=2) / INT8_MAX).half()
    q = _whole_numbers(groups, d_NG, 0.0, -INT8_MAX, INT8_MAX)
    return QuantisedTensor(q.to(torch.int8).flatten(1), d_NG, None)


def quantise_int4(weight_NK: torch.Tensor) -> QuantisedTensor:
    """Round to nearest over each group's range, or over a slightly smaller one where the squared error is less."""
    groups = weight_NK.float().unflatten(1, (-1, QUANTISATION_GROUP))
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    middle, reach = (low + high) / 2, (high - low) / 2
    best_d, best_m, best_q, best_error = None, None, None, None
    for shrink in SHRINKS:
        d = (2 * shrink * reach / INT4_MAX).half()
        m = (middle - shrink * reach).half()
        q = _whole_numbers(groups, d, m.float()[..., None], 0, INT4_MAX)
        error = (q * d.float()[..., None] + m.float()[..., None] - groups).square().sum(dim=2)
        if best_error is None:
            best_d, best_m, best_q, best_error = d, m, q, error
            continue
        assert best_d is not None and best_m is not None and best_q is not None
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_d, best_m = torch.where(is_better, d, best_d), torch.where(is_better, m, best_m)
        best_q = torch.where(is_better[..., None], q, best_q)
    assert best_d is not None and best_m is not None and best_q is not None
    return QuantisedTensor(best_q.to(torch.uint8).flatten(1), best_d, best_m)


def quantise_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scales [N]): round to nearest, symmetric, one scale an output."""
    weight = weight_NK.float()
    scale_N = weight.abs().amax(dim=1) / INT8_MAX
    q_NK = (weight / scale_N.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return q_NK.clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0).to(torch.int8), scale_N


def _whole_numbers(
    groups: torch.Tensor, d_NG: torch.Tensor, offset: torch.Tensor | float, low: int, high: int
) -> torch.Tensor:
    """(groups - offset) / d, rounded into low..high; 0 where d is 0 or nothing is finite."""
    d = d_NG.float()[..., None]
    q = torch.where(d != 0, (groups - offset) / d, 0.0)
    return q.nan_to_num_(0.0, high, low).round_().clamp_(low, high)
