"""What changes logits in place before sampling: penalties, logit bias, grammar bitmasks.

R rows, V vocabulary, N entries of sparse lists, M bitmasks, W words of 32 tokens. Order: penalties, bias, bitmask; then
temperature and the filters (sampling.py). Lists name the tokens that change, so nothing is as large as [R, V].
"""

import ctypes
import dataclasses

import torch

from .backend import find_function
from .catalogue import operator
from .native import INT64, POINTER, launch, needs_code

BITS = 32


@dataclasses.dataclass(frozen=True)
class TokenLists:
    """Tokens of R rows: row r has token_ids_N[starts_R[r] : ends_R[r]], all int32.

    Rows may have room behind their end, or share entries. CSR row starts s are `starts_R=s[:-1], ends_R=s[1:]`.
    """

    starts_R: torch.Tensor
    ends_R: torch.Tensor
    token_ids_N: torch.Tensor

    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, index into N and token id (int64) of every entry in use."""
        starts_R, lens_R = self.starts_R.long(), (self.ends_R - self.starts_R).long()
        rows = torch.repeat_interleave(torch.arange(len(lens_R), device=lens_R.device), lens_R)
        shift_R = starts_R - (lens_R.cumsum(0) - lens_R)
        indices = torch.arange(len(rows), device=rows.device) + shift_R[rows]
        return rows, indices, self.token_ids_N[indices].long()


@dataclasses.dataclass(frozen=True)
class PenaltyTensors:
    """float32 [R] each; 1, 0, 0 are off."""

    repetition_R: torch.Tensor
    frequency_R: torch.Tensor
    presence_R: torch.Tensor


@operator
def apply_penalties(
    logits_RV: torch.Tensor, tokens: TokenLists, output_counts_N: torch.Tensor, penalties: PenaltyTensors
) -> None:
    """Make tokens that occur in prompt or output less likely, in place.

    `tokens` are the distinct tokens of each row's prompt and output, `output_counts_N` (int32) how often each is in the
    output: 0 for one of the prompt alone, which may be left out where repetition is 1. First the repetition penalty
    (Keskar et al. 2019, as in Hugging Face): a logit above 0 is divided by it, another multiplied. Then OpenAI's:
    logit -= frequency * count, logit -= presence where the count is above 0.
    """
    rows, indices, token_ids = tokens.entries()
    logits = logits_RV[rows, token_ids]
    repetition = penalties.repetition_R[rows]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    counts = output_counts_N[indices].float()
    logits = logits - penalties.frequency_R[rows] * counts
    logits_RV[rows, token_ids] = torch.where(counts > 0, logits - penalties.presence_R[rows], logits)


@operator
def apply_logit_bias(logits_RV: torch.Tensor, tokens: TokenLists, biases_N: torch.Tensor) -> None:
    """Add each entry's bias (float32, finite or -inf) to its logit, in place. -inf forbids the token."""
    rows, indices, token_ids = tokens.entries()
    logits_RV.index_put_((rows, token_ids), biases_N[indices], accumulate=True)


@operator
def apply_token_bitmask(logits_RV: torch.Tensor, bitmask_MW: torch.Tensor, mask_of_R: torch.Tensor) -> None:
    """Forbid the tokens whose bit is 0, in place (-inf).

    Row r obeys bitmask_MW[mask_of_R[r]] (both int32), and is left alone where that is -1. Token v is bit v % 32 of word
    v // 32, W = ceil(V / 32): the layout of llguidance and XGrammar. ValueError where W is another.
    """
    if bitmask_MW.shape[1] != _num_words(logits_RV):
        raise ValueError(f"{bitmask_MW.shape[1]} words of a bitmask do not fit {logits_RV.shape[1]} tokens")
    rows = (mask_of_R >= 0).nonzero()[:, 0]
    words = bitmask_MW[mask_of_R[rows].long()]
    bits = words[:, :, None] >> torch.arange(BITS, dtype=torch.int32, device=words.device) & 1
    is_forbidden_RV = bits.flatten(1)[:, : logits_RV.shape[1]] == 0
    logits_RV[rows] = logits_RV[rows].masked_fill(is_forbidden_RV, float("-inf"))


def _num_words(logits_RV: torch.Tensor) -> int:
    return -(-logits_RV.shape[1] // BITS)


class SparseArgs(ctypes.Structure):
    """sparse_args of cpu_logits.c."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "starts", "ends", "token_ids", "values")),
        *((name, POINTER) for name in ("repetition", "frequency", "presence")),
        *((name, INT64) for name in ("num_rows", "vocab_size", "row_stride")),
    )


class BitmaskArgs(ctypes.Structure):
    """bitmask_args of cpu_logits.c."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "bitmask", "mask_of")),
        *((name, INT64) for name in ("num_rows", "vocab_size", "row_stride", "num_masks")),
    )


def _can_change(name: str, logits_RV: torch.Tensor, integers: tuple[torch.Tensor, ...]) -> bool:
    return (
        logits_RV.device.type == "cpu"
        and logits_RV.dtype == torch.float32
        and logits_RV.stride(1) == 1
        and all(column.dtype == torch.int32 and column.is_contiguous() for column in integers)
        and find_function("cpu_logits.c", name) is not None
    )


def _are_floats(*columns: torch.Tensor) -> bool:
    return all(column.dtype == torch.float32 and column.is_contiguous() for column in columns)


def _can_penalise(
    logits_RV: torch.Tensor, tokens: TokenLists, output_counts_N: torch.Tensor, penalties: PenaltyTensors
) -> bool:
    integers = (tokens.starts_R, tokens.ends_R, tokens.token_ids_N, output_counts_N)
    return _can_change("apply_penalties", logits_RV, integers) and _are_floats(
        penalties.repetition_R, penalties.frequency_R, penalties.presence_R
    )


def _can_bias(logits_RV: torch.Tensor, tokens: TokenLists, biases_N: torch.Tensor) -> bool:
    integers = (tokens.starts_R, tokens.ends_R, tokens.token_ids_N)
    return _can_change("apply_logit_bias", logits_RV, integers) and _are_floats(biases_N)


def _can_mask(logits_RV: torch.Tensor, bitmask_MW: torch.Tensor, mask_of_R: torch.Tensor) -> bool:
    has_words = bitmask_MW.shape[1] == _num_words(logits_RV)
    return has_words and _can_change("apply_token_bitmask", logits_RV, (bitmask_MW, mask_of_R))


@apply_penalties.version("c", takes=_can_penalise, why_not=needs_code("cpu_logits.c"))
def apply_penalties_c(
    logits_RV: torch.Tensor, tokens: TokenLists, output_counts_N: torch.Tensor, penalties: PenaltyTensors
) -> None:
    """fp32 on CPU; rows may be apart, columns are contiguous. OperatorError where a token id is out of range."""
    columns = (penalties.repetition_R, penalties.frequency_R, penalties.presence_R)
    _launch_sparse("apply_penalties", logits_RV, tokens, output_counts_N, columns)


@apply_logit_bias.version("c", takes=_can_bias, why_not=needs_code("cpu_logits.c"))
def apply_logit_bias_c(logits_RV: torch.Tensor, tokens: TokenLists, biases_N: torch.Tensor) -> None:
    """fp32 on CPU; rows may be apart, columns are contiguous. OperatorError where a token id is out of range."""
    _launch_sparse("apply_logit_bias", logits_RV, tokens, biases_N, ())


@apply_token_bitmask.version("c", takes=_can_mask, why_not=needs_code("cpu_logits.c"))
def apply_token_bitmask_c(logits_RV: torch.Tensor, bitmask_MW: torch.Tensor, mask_of_R: torch.Tensor) -> None:
    """fp32 on CPU; rows may be apart, masks are contiguous. OperatorError where there is no such mask."""
    pointers = (logits_RV.data_ptr(), bitmask_MW.data_ptr(), mask_of_R.data_ptr())
    args = BitmaskArgs(*pointers, *logits_RV.shape, logits_RV.stride(0), bitmask_MW.shape[0])
    launch(find_function("cpu_logits.c", "apply_token_bitmask"), args)


def _launch_sparse(
    name: str, logits_RV: torch.Tensor, tokens: TokenLists, values_N: torch.Tensor, columns: tuple[torch.Tensor, ...]
) -> None:
    tensors = (logits_RV, tokens.starts_R, tokens.ends_R, tokens.token_ids_N, values_N, *columns)
    pointers = [x.data_ptr() for x in tensors] + [None] * (3 - len(columns))
    launch(find_function("cpu_logits.c", name), SparseArgs(*pointers, *logits_RV.shape, logits_RV.stride(0)))
