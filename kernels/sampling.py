"""Sampling of one token per row, vectorised over the batch; a row's outcome depends on nothing but the row.

R rows, V vocabulary. Order: temperature, top-k, top-p (of what top-k leaves), min-p, then Gumbel-max. Every filter is
one threshold on the scaled logits: it keeps all tokens at or above it, ties included. Probability mass is summed in
64-bit integers, which no order of summation changes, so looking at the largest candidates first is exact. Every
version computes the same bits, so all give the same ids.
"""

import ctypes
import dataclasses

import torch

from .native import INT64, POINTER, find_sampler
from .noise import MAX_GUMBEL, gumbel, log

NUM_CANDIDATES = 256
MASS_SCALE = 2.0**40
ROUND_SHIFT = 12582912.0  # 1.5 * 2^23: adding it to a float32 rounds to an integer
FAILED = -1


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


def mask_token_ids(logits_RV: torch.Tensor, row: int, token_ids: list[int]) -> None:
    """Forbid tokens in one row, in place (end tokens before `min_new_tokens`)."""
    logits_RV[row, token_ids] = float("-inf")


def sample(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """Token ids (int64 [R]) from float32 logits; `positions_R` (int64) are the absolute positions of the new tokens.

    A row with a NaN, or with no token that is allowed, gives FAILED (-1). Ties go to the lowest id.
    """
    sampler = find_sampler(logits_RV)
    if sampler is None:
        return sample_torch(logits_RV, params, positions_R)
    logits = logits_RV.contiguous()
    ids_R = torch.empty(logits.shape[0], dtype=torch.int64)
    floats = (logits, params.temperature_R, params.top_p_R, _log_min_p(params.min_p_R))
    integers = (params.top_k_R, params.seed_R, positions_R)
    tensors = (*(x.float().contiguous() for x in floats), *(x.long().contiguous() for x in integers), ids_R)
    args = SamplingArgs(*(x.data_ptr() for x in tensors), *logits.shape, torch.get_num_threads())
    if sampler(ctypes.byref(args)) != 0:
        raise MemoryError("sample: no memory for a row of logits")
    return ids_R


class SamplingArgs(ctypes.Structure):
    """sampling_args of cpu_sampling.c."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "temperature", "top_p", "log_min_p")),
        *((name, POINTER) for name in ("top_k", "seeds", "positions", "ids")),
        *((name, INT64) for name in ("num_rows", "vocab_size", "num_threads")),
    )


def sample_torch(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """The reference."""
    if logits_RV.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits_RV.device)
    max_R, ids_R = logits_RV.max(dim=-1)
    is_sampled_R = (params.temperature_R > 0) & (max_R / params.temperature_R).isfinite()
    rows = is_sampled_R.nonzero()[:, 0]
    if rows.numel():
        ids_R[rows] = _sample_rows(logits_RV[rows], params.select(rows), positions_R[rows])
    return ids_R.masked_fill_(max_R.isnan() | (max_R == float("-inf")), FAILED)


def _sample_rows(logits_RV: torch.Tensor, params: SamplingTensors, positions_R: torch.Tensor) -> torch.Tensor:
    """Sample rows whose temperature is above 0 and whose largest logit is finite."""
    z_RV = logits_RV / params.temperature_R[:, None]
    z_RV -= z_RV.amax(dim=-1, keepdim=True)
    top_RC = z_RV.topk(min(NUM_CANDIDATES, z_RV.shape[1]), dim=-1).values
    threshold_R = torch.full_like(params.temperature_R, torch.finfo(torch.float32).min)
    threshold_R = torch.maximum(threshold_R, _top_k_threshold(z_RV, top_RC, params.top_k_R))
    threshold_R = torch.maximum(threshold_R, _top_p_threshold(z_RV, top_RC, threshold_R, params.top_p_R))
    threshold_R = torch.maximum(threshold_R, _log_min_p(params.min_p_R))
    return _gumbel_max(z_RV, top_RC, threshold_R, params.seed_R, positions_R)


def _log_min_p(min_p_R: torch.Tensor) -> torch.Tensor:
    """How far below the largest logit min-p keeps tokens (float32, at most 0); -inf where it is off."""
    is_on_R = min_p_R > 0
    if not bool(is_on_R.any()):
        return torch.full_like(min_p_R, float("-inf"))
    return log(min_p_R.double().where(is_on_R, 1.0)).float().where(is_on_R, float("-inf")).clamp(max=0)


def _top_k_threshold(z_RV: torch.Tensor, top_RC: torch.Tensor, top_k_R: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row; -inf where top-k is off."""
    num_candidates, vocab_size = top_RC.shape[1], z_RV.shape[1]
    is_on_R = (top_k_R >= 1) & (top_k_R < vocab_size)
    index_R = (top_k_R - 1).clamp(0, num_candidates - 1)
    threshold_R = top_RC.gather(1, index_R[:, None])[:, 0]
    for row in (is_on_R & (top_k_R > num_candidates)).nonzero()[:, 0].tolist():
        threshold_R[row] = z_RV[row].topk(int(top_k_R[row])).values[-1]
    return threshold_R.masked_fill(~is_on_R, float("-inf"))


def _mass(z: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in fixed point (int64): sums of up to 2^22 of them are exact."""
    return (_exp(z) * MASS_SCALE).to(torch.int64)


def _exp(z: torch.Tensor) -> torch.Tensor:
    """e^z of float32 z <= 0 in a fixed order of operations: 2^n * e^r with z = n ln 2 + r, e^r by its Taylor series."""
    z = z.clamp(min=-87.0)
    n = (z * 1.44269504 + ROUND_SHIFT) - ROUND_SHIFT
    r = (z - n * 0.693359375) + n * 2.12194440e-4
    p = r * (1 / 720) + 1 / 120
    for coefficient in (1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = p * r + coefficient
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def _top_p_threshold(
    z_RV: torch.Tensor, top_RC: torch.Tensor, threshold_R: torch.Tensor, top_p_R: torch.Tensor
) -> torch.Tensor:
    """The smallest value that top-p keeps: mass above it is below top_p of the row's mass; -inf where it is off."""
    result_R = torch.full_like(threshold_R, float("-inf"))
    rows = (top_p_R < 1).nonzero()[:, 0]
    for row in rows.tolist():
        z_V = z_RV[row]
        mass_V = _mass(z_V).masked_fill_(z_V < threshold_R[row], 0)
        needed = (top_p_R[row].double() * mass_V.sum().double()).to(torch.int64).clamp(min=1)
        sorted_z = top_RC[row]
        cumulative = _mass(sorted_z).cumsum(0)
        if bool(cumulative[-1] < needed):
            sorted_z = z_V.sort(descending=True).values
            cumulative = _mass(sorted_z).cumsum(0)
        result_R[row] = sorted_z[torch.searchsorted(cumulative, needed)]
    return result_R


def _gumbel_max(
    z_RV: torch.Tensor, top_RC: torch.Tensor, threshold_R: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor
) -> torch.Tensor:
    """argmax of z + noise over the tokens at or above the threshold."""
    winners_R, best_R = _noisy_argmax(z_RV, torch.maximum(threshold_R, top_RC[:, -1]), seed_R, positions_R)
    can_win_R = (best_R - MAX_GUMBEL).float()
    remaining_R = torch.maximum(threshold_R, can_win_R)
    rows = (remaining_R < top_RC[:, -1]).nonzero()[:, 0]
    if rows.numel():
        winners_R[rows] = _noisy_argmax(z_RV[rows], remaining_R[rows], seed_R[rows], positions_R[rows])[0]
    return winners_R


def _noisy_argmax(
    z_RV: torch.Tensor, threshold_R: torch.Tensor, seed_R: torch.Tensor, positions_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner's id and score (float64) among the tokens at or above the threshold, the lowest id of a tie."""
    rows, ids = (z_RV >= threshold_R[:, None]).nonzero(as_tuple=True)
    scores = z_RV[rows, ids].double() + gumbel(seed_R[rows], positions_R[rows], ids)
    best_R = scores.new_full((z_RV.shape[0],), float("-inf")).scatter_reduce_(0, rows, scores, "amax")
    ids = ids.masked_fill(scores < best_R[rows], z_RV.shape[1])
    winners_R = torch.full_like(seed_R, z_RV.shape[1]).scatter_reduce_(0, rows, ids, "amin")
    return winners_R, best_R
