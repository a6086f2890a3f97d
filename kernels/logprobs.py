"""Log-probabilities of given and of the likeliest tokens.

R rows (requests, or positions of a prompt), V vocabulary, K tokens at the top of each row.
"""

import ctypes

import torch

from .backend import find_function
from .catalogue import operator
from .native import INT64, POINTER, launch, needs_code, new_empty

NO_TOKEN = -1
NAN = float("nan")


@operator
def token_logprobs(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log softmax of float32 logits at ids_R (int64): float32 [R]; ids (int64 [R, K]) and log-probabilities (float32
    [R, K]) of the K = num_top likeliest tokens, falling, ties by the lowest id. Within 1e-5 of exact arithmetic for
    log-probabilities above -64, else within float32's rounding.

    Of the logits as they come: give those of the model, before penalties, bias, masks and temperature, as OpenAI and
    vLLM report; rows that are changed in place are copied first. An id that is not in the vocabulary gives NaN; a row
    with a NaN, with +inf or without a finite logit gives NaN and ids of -1. ValueError where K is above V.
    """
    if not 0 <= num_top <= logits_RV.shape[1]:
        raise ValueError(f"num_top must be 0 to {logits_RV.shape[1]}, not {num_top}")
    vocab_size = logits_RV.shape[1]
    log_sum_R = logits_RV.double().logsumexp(-1)
    is_good_R = logits_RV.amax(-1).isfinite()
    is_known_R = (ids_R >= 0) & (ids_R < vocab_size)
    chosen_R = logits_RV.gather(1, ids_R.clamp(0, vocab_size - 1)[:, None])[:, 0]
    logprob_R = (chosen_R.double() - log_sum_R).float().masked_fill(~(is_good_R & is_known_R), NAN)
    top_ids_RK = _falling_keys(logits_RV).topk(num_top, dim=-1).indices
    top_RK = (logits_RV.gather(1, top_ids_RK).double() - log_sum_R[:, None]).float()
    is_bad_R1 = ~is_good_R[:, None]
    return logprob_R, top_ids_RK.masked_fill(is_bad_R1, NO_TOKEN), top_RK.masked_fill(is_bad_R1, NAN)


def _falling_keys(logits_RV: torch.Tensor) -> torch.Tensor:
    """Distinct int64 in the order of (logit, -id): a float's bits with the negative ones turned round, then the id."""
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # -0 becomes 0
    order_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    return (order_RV.long() << 32) - torch.arange(logits_RV.shape[1], device=logits_RV.device)


class LogprobsArgs(ctypes.Structure):
    """logprobs_args of cpu_logprobs.c."""

    _fields_ = (
        *((name, POINTER) for name in ("logits", "ids", "logprobs", "top_ids", "top_logprobs")),
        *((name, INT64) for name in ("num_rows", "vocab_size", "row_stride", "num_top")),
    )


def _can_run(logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> bool:
    return (
        logits_RV.device.type == "cpu"
        and logits_RV.dtype == torch.float32
        and logits_RV.stride(1) == 1
        and ids_R.dtype == torch.int64
        and ids_R.is_contiguous()
        and 0 <= num_top <= logits_RV.shape[1]
        and find_function("cpu_logprobs.c", "token_logprobs") is not None
    )


@token_logprobs.version("c", takes=_can_run, why_not=needs_code("cpu_logprobs.c"))
def token_logprobs_c(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 on CPU; rows may be apart."""
    num_rows, vocab_size = logits_RV.shape
    logprob_R = new_empty((num_rows,), torch.float32)
    top_ids_RK = new_empty((num_rows, num_top), torch.int64)
    top_RK = new_empty((num_rows, num_top), torch.float32)
    pointers = [x.data_ptr() for x in (logits_RV, ids_R, logprob_R, top_ids_RK, top_RK)]
    args = LogprobsArgs(*pointers, num_rows, vocab_size, logits_RV.stride(0), num_top)
    launch(find_function("cpu_logprobs.c", "token_logprobs"), args)
    return logprob_R, top_ids_RK, top_RK
