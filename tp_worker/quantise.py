"""Weights as whole numbers: in groups of 32 inputs, as GGUF's plain types have them, or with one scale an output.

N output features, K input features, G = K / 32 groups. What is not finite stays not finite: it ends in a scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..common.model_struct import QUANTISATION_GROUP

INT4_MAX, INT8_MAX = 15, 127
NUM_FITS = 2  # of a group's scale and offset to its rounded values; together they take an eighth of the squared error
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

    def move_rows(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "QuantisedTensor":
        """The tensor whose rows `move` has put elsewhere, whatever the number of columns."""
        m_NG = None if self.m_NG is None else move(self.m_NG)
        return QuantisedTensor(move(self.q_NK), move(self.d_NG), m_NG)

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
    groups = _groups(weight_NK)
    d_NG = (groups.abs().amax(dim=2) / INT8_MAX).half()
    q = _whole_numbers(groups, d_NG, None, -INT8_MAX, INT8_MAX)
    return QuantisedTensor(q.to(torch.int8).flatten(1), d_NG, None)


def quantise_int4(weight_NK: torch.Tensor) -> QuantisedTensor:
    """Round to nearest over each group's range; then, alternately, fit d and m by least squares and round again."""
    groups = _groups(weight_NK)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    d_NG, m_NG = ((high - low) / INT4_MAX).half(), low.half()
    q = _whole_numbers(groups, d_NG, m_NG, 0, INT4_MAX)
    for _ in range(NUM_FITS):
        d_NG, m_NG = _fit(groups, q, d_NG, m_NG)
        q = _whole_numbers(groups, d_NG, m_NG, 0, INT4_MAX)
    return QuantisedTensor(q.to(torch.uint8).flatten(1), d_NG, m_NG)


def _groups(weight_NK: torch.Tensor) -> torch.Tensor:
    """float32 [N, G, 32]."""
    return weight_NK.float().view(len(weight_NK), -1, QUANTISATION_GROUP)


def _fit(
    groups: torch.Tensor, q: torch.Tensor, d_NG: torch.Tensor, m_NG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The d and m that bring d * q + m closest to the values; as they are where all of a group's q are the same."""
    sum_q, sum_x = q.sum(dim=2), groups.sum(dim=2)
    spread = QUANTISATION_GROUP * q.square().sum(dim=2) - sum_q.square()
    d = (QUANTISATION_GROUP * (q * groups).sum(dim=2) - sum_q * sum_x) / spread
    m = (sum_x - d * sum_q) / QUANTISATION_GROUP
    return torch.where(spread != 0, d.half(), d_NG), torch.where(spread != 0, m.half(), m_NG)


def quantise_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scales [N]): round to nearest, symmetric, one scale an output."""
    weight = weight_NK.float()
    scale_N = weight.abs().amax(dim=1) / INT8_MAX
    q_NK = (weight / scale_N.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return q_NK.clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(0.0).to(torch.int8), scale_N


def _whole_numbers(
    groups: torch.Tensor, d_NG: torch.Tensor, m_NG: torch.Tensor | None, low: int, high: int
) -> torch.Tensor:
    """(groups - m) / d, rounded into low..high; 0 where d is 0 or nothing is finite."""
    d = d_NG.float()[..., None]
    shifted = groups if m_NG is None else groups - m_NG.float()[..., None]
    return torch.where(d != 0, shifted / d, 0.0).nan_to_num_(0.0, high, low).round_().clamp_(low, high)
