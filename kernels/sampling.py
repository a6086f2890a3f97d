"""Sampling of one token per row, vectorised over the batch; a row's outcome depends on nothing but the row.

R rows, V vocabulary, C candidates. Order: temperature, top-k, top-p (of what top-k leaves), min-p, then Gumbel-max.
Every filter is one threshold on the scaled logits z <= 0: it keeps all tokens at or above it, ties included. So the
vocabulary is searched, not sorted. Probability mass is counted in 2^-29ths of the likeliest token's, rounded down:
sums of integers are exact in any order. Every version computes the same bits, so all give the same ids.
"""

import ctypes
import dataclasses
from collections.abc import Callable

import torch

from .backend import find_function
from .catalogue import operator
from .native import INT64, POINTER, launch, needs_code, new_empty
from .noise import MAX_GUMBEL, gumbel, log, vocabulary_words

NUM_CANDIDATES = 256
MASS_BITS = 29
MASSLESS = -21.0  # e^z 2^29 is below 1
ROUND_SHIFT = 12582912.0 + MASS_BITS  # 1.5 * 2^23 and a whole number: adding it to a float32 rounds to a whole number
FLOAT_MIN = torch.finfo(torch.float32).min
FAILED = -1
GROUP, GROUP_SCRATCH = 1024, 11  # cpu_rows.h, and 64-bit words of group_scratch in cpu_sampling.c


@dataclasses.dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of R rows.

    temperature_R: float32, 0 is greedy. top_k_R: int64, below 1 is off. top_p_R: float32, 1 is off. min_p_R: float32,
    0 is off. seed_R: int64 holding the 64 bits of the seed.
    """

    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seed_R: torch.Tensor

    def select(self, rows: torch.Tensor) -> "SamplingTensors":
        """The parameters of some rows."""
        return SamplingTensors(
            self.temperature_R[rows], self.top_k_R[rows], self.top_p_R[rows], self.min_p_R[rows], self.seed_R[rows]
        )


@operator
def sample(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """Token ids (int64 [R]) from float32 logits; `positions_R` (int64) are the absolute positions of the new tokens.

    A row with a NaN, or with no token that is allowed, gives FAILED (-1). Ties go to the lowest id.
    """
    if logits_RV.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits_RV.device)
    top_R, ids_R = logits_RV.max(dim=-1)
    scale_R = 1.0 / params.temperature_R
    rows = (top_R.isfinite() & scale_R.isfinite() & (scale_R > 0)).nonzero()[:, 0]
    if rows.numel():
        z_RV = (logits_RV[rows] - top_R[rows, None]) * scale_R[rows, None]
        ids_R[rows] = _sample_scaled(z_RV, params.select(rows), positions_R[rows])
    return ids_R.masked_fill_(top_R.isnan() | (top_R == float("-inf")), FAILED)


def _sample_scaled(z_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """Sample rows whose largest z is 0."""
    top_RC = z_RV.topk(min(NUM_CANDIDATES, z_RV.shape[1]), dim=-1).values
    threshold_R = _top_k_threshold(z_RV, top_RC, params.top_k_R).clamp(min=FLOAT_MIN)
    threshold_R = torch.maximum(threshold_R, _top_p_threshold(z_RV, top_RC, threshold_R, params.top_p_R))
    threshold_R = torch.maximum(threshold_R, _log_min_p(params.min_p_R))
    return _gumbel_max(z_RV, top_RC, threshold_R, params.seed_R, positions_R)


def _top_k_threshold(z_RV: torch.Tensor, top_RC: torch.Tensor, top_k_R: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row; -inf where top-k is off."""
    is_on_R = (top_k_R >= 1) & (top_k_R < z_RV.shape[1])
    needed_R = top_k_R.double().where(is_on_R, 1.0)
    return _find_threshold(z_RV, top_RC, needed_R, _count).masked_fill(~is_on_R, float("-inf"))


def _top_p_threshold(
    z_RV: torch.Tensor, top_RC: torch.Tensor, threshold_R: torch.Tensor, top_p_R: torch.Tensor
) -> torch.Tensor:
    """The largest value at or above which lies top_p of the mass that the threshold leaves; -inf where it is off."""
    is_on_R = top_p_R < 1
    rows = is_on_R.nonzero()[:, 0]
    threshold = torch.full_like(top_p_R, float("-inf"))
    if rows.numel():
        z_RV = z_RV[rows]
        total_R = _mass(z_RV).where(z_RV >= threshold_R[rows, None], 0).sum(-1)
        needed_R = top_p_R[rows].double() * total_R.double()
        threshold[rows] = _find_threshold(z_RV, top_RC[rows], needed_R, _mass)
    return threshold


def _log_min_p(min_p_R: torch.Tensor) -> torch.Tensor:
    """How far below the largest value min-p keeps tokens (float32, at most 0); -inf where it is off."""
    is_on_R = min_p_R > 0
    return log(min_p_R.double().where(is_on_R, 1.0)).float().clamp(max=0).where(is_on_R, float("-inf"))


def _find_threshold(
    z_RV: torch.Tensor,
    top_RC: torch.Tensor,
    needed_R: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The largest value of each row such that the tokens at or above it weigh `needed` (float64) or more."""
    num_candidates = top_RC.shape[1]
    index_R = torch.searchsorted(weigh(top_RC).cumsum(-1).double(), needed_R[:, None])[:, 0]
    threshold_R = top_RC.gather(1, index_R.clamp(max=num_candidates - 1)[:, None])[:, 0]
    rows = (index_R == num_candidates).nonzero()[:, 0]
    if rows.numel():
        more_RC = z_RV[rows].topk(min(num_candidates * 16, z_RV.shape[1]), dim=-1).values
        threshold_R[rows] = _find_threshold(z_RV[rows], more_RC, needed_R[rows], weigh)
    return threshold_R


def _count(z: torch.Tensor) -> torch.Tensor:
    """A token weighs 1 (int64)."""
    return torch.ones_like(z, dtype=torch.int64)


def _mass(z: torch.Tensor) -> torch.Tensor:
    """e^z 2^29 of float32 z <= 0, rounded down (int64), in a fixed order of operations and within 1e-5 of its value.

    2^n 2^r with z / ln 2 = n + r, 2^r by its Taylor series. What is below 1 need only stay below 1.
    """
    exponent = z.clamp(min=MASSLESS) * 1.44269504
    n = (exponent + ROUND_SHIFT) - ROUND_SHIFT
    r = exponent - n
    p = r * 0.00133335581 + 0.00961812911
    for coefficient in (0.0555041087, 0.240226507, 0.693147181, 1.0):
        p = p * r + coefficient
    bits = p.view(torch.int32) + (n.to(torch.int32) + MASS_BITS << 23)
    return bits.view(torch.float32).to(torch.int64)


def _gumbel_max(
    z_RV: torch.Tensor, top_RC: torch.Tensor, threshold_R: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor
) -> torch.Tensor:
    """argmax of z + noise over the tokens at or above the threshold: of the C largest, then of all that can still win."""
    least_R = top_RC[:, -1]
    is_candidate_RV = z_RV >= torch.maximum(threshold_R, least_R)[:, None]
    winners_R, best_R = _noisy_argmax(z_RV, is_candidate_RV, seed_R, positions_R)
    threshold_R = torch.maximum(threshold_R, (best_R - MAX_GUMBEL).float())
    rows = (threshold_R < least_R).nonzero()[:, 0]
    if rows.numel():
        z_RV, seed_R, positions_R = z_RV[rows], seed_R[rows], positions_R[rows]
        can_win_RV = (z_RV >= threshold_R[rows, None]) & _may_reach(best_R[rows], z_RV, seed_R, positions_R)
        winners_R[rows] = _noisy_argmax(z_RV, can_win_RV, seed_R, positions_R)[0]
    return winners_R


def _may_reach(
    best_R: torch.Tensor, z_RV: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor
) -> torch.Tensor:
    """False where z + noise is below the best for certain: noise of g or more needs a word of at least 2^32 (1 - e^-g).
    The margins are for rounding."""
    words_RV = vocabulary_words(seed_R, positions_R, z_RV.shape[1])
    may_lack_RV = (z_RV - best_R.float()[:, None]).exp() * (1.0001 * 2.0**32)
    return words_RV >= 2.0**32 - 1024 - may_lack_RV


def _noisy_argmax(
    z_RV: torch.Tensor, is_candidate_RV: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner's id and score (float64) among a row's candidates, the lowest id of a tie."""
    rows, ids = is_candidate_RV.nonzero(as_tuple=True)
    scores = z_RV[rows, ids].double() + gumbel(seed_R[rows], positions_R[rows], ids)
    best_R = scores.new_full((z_RV.shape[0],), float("-inf")).scatter_reduce_(0, rows, scores, "amax")
    ids = ids.masked_fill(scores < best_R[rows], z_RV.shape[1])
    winners_R = torch.full_like(seed_R, z_RV.shape[1]).scatter_reduce_(0, rows, ids, "amin")
    return winners_R, best_R


class SamplingArgs(ctypes.Structure):
    """sampling_args of cpu_sampling.c."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "temperature", "top_p", "min_p", "top_k", "seeds", "positions")),
        *((name, POINTER) for name in ("ids", "scratch", "values")),
        *((name, INT64) for name in ("num_rows", "vocab_size", "row_stride")),
    )


def _can_sample(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> bool:
    floats = (params.temperature_R, params.top_p_R, params.min_p_R)
    integers = (params.top_k_R, params.seed_R, positions_R)
    return (
        logits_RV.device.type == "cpu"
        and logits_RV.dtype == torch.float32
        and logits_RV.stride(1) == 1
        and all(column.dtype == torch.float32 and column.is_contiguous() for column in floats)
        and all(column.dtype == torch.int64 and column.is_contiguous() for column in integers)
        and find_function("cpu_sampling.c", "sample") is not None
    )


@sample.version("c", takes=_can_sample, why_not=needs_code("cpu_sampling.c"))
def sample_c(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """fp32 on CPU; rows may be apart, columns are contiguous and of the documented types."""
    num_rows, vocab_size = logits_RV.shape
    ids_R = new_empty((num_rows,), torch.int64)
    scratch = new_empty((num_rows, -(-vocab_size // GROUP), GROUP_SCRATCH), torch.int64)
    values = new_empty((torch.get_num_threads(), vocab_size + GROUP), torch.float32)
    floats = (logits_RV, params.temperature_R, params.top_p_R, params.min_p_R)
    tensors = (*floats, params.top_k_R, params.seed_R, positions_R, ids_R, scratch, values)
    args = SamplingArgs(*(x.data_ptr() for x in tensors), num_rows, vocab_size, logits_RV.stride(0))
    launch(find_function("cpu_sampling.c", "sample"), args)
    return ids_R
