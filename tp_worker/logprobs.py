"""Log-probabilities of a step: of the tokens that it samples, and of the prompt tokens that it computes.

N logits rows, V vocabulary, K likeliest tokens, A tokens that a request asks for, T tokens of the step. What is wanted
follows from the batch stream alone, so that all ranks enter the same collectives; rank 0 brings the numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..common.logprobs import LogprobReq, TokenLogprobs
from ..kernels.logprobs import token_logprobs
from .rows import Int64Array, Rows
from .step import Step

MAX_LOGITS_ROWS = 128  # of prompt positions that exist at once
Columns = list[np.ndarray[Any, np.dtype[Any]]]  # logprobs [N], top_ids [N, K], top_logprobs [N, K], asked [N, A]


class KeptLogits(NamedTuple):
    """The model's logits of the sampling rows that want log-probabilities, before the sampler changes them."""

    indices_N: list[int]  # among the S rows that sample
    requests: list[LogprobReq]
    logits_NV: torch.Tensor


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A row's prompt positions of this step whose logits are wanted, and the tokens that follow them."""

    row: int
    request: LogprobReq
    indices: Int64Array  # of the T tokens
    labels: Int64Array


def prompt_parts(rows: Rows, step: Step) -> list[PromptPart]:
    """The prompt positions whose logits are wanted, by row."""
    if not rows.logprobs:
        return []
    parts = []
    for chunk in step.chunks():
        wanted = rows.logprobs.get(chunk.row)
        if wanted is None:
            continue
        first, last = max(chunk.start, wanted.request.start_len), min(chunk.end, wanted.prompt_len - 1)
        if first < last:
            indices = np.arange(first, last, dtype=np.int64) + (chunk.first - chunk.start)
            labels = rows.input_ids[chunk.row][first + 1 : last + 1].astype(np.int64)
            parts.append(PromptPart(chunk.row, wanted.request, indices, labels))
    return parts


def prompt_logprobs(
    parts: list[PromptPart], hidden_NF: torch.Tensor, to_logits: Callable[[torch.Tensor], torch.Tensor | None]
) -> dict[int, TokenLogprobs]:
    """By row, on rank 0; nothing on the others. At most MAX_LOGITS_ROWS rows of logits exist at once."""
    labels_N = np.concatenate([part.labels for part in parts])
    part_of_N = np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts])
    num_top, asked_ids = _widths([part.request for part in parts])
    pieces = []
    for start in range(0, len(labels_N), MAX_LOGITS_ROWS):
        span = slice(start, start + MAX_LOGITS_ROWS)
        logits_NV = to_logits(hidden_NF[span])
        if logits_NV is not None:
            pieces.append(_columns(logits_NV, labels_N[span], num_top, asked_ids[part_of_N[span]]))
    if not pieces:
        return {}
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    ends = np.cumsum([len(part.labels) for part in parts]).tolist()
    return {
        part.row: _cut(columns, slice(end - len(part.labels), end), part.request)
        for part, end in zip(parts, ends, strict=True)
    }


def keep_logits(rows: Rows, sampling_rows_S: Sequence[int], logits_SV: torch.Tensor | None) -> KeptLogits | None:
    """A copy of what the sampler would change; None where nobody wants log-probabilities, and on other ranks."""
    if not rows.logprobs or logits_SV is None:
        return None
    wanted = [(i, rows.logprobs[row].request) for i, row in enumerate(sampling_rows_S) if row in rows.logprobs]
    if not wanted:
        return None
    indices_N = [i for i, _ in wanted]
    return KeptLogits(indices_N, [request for _, request in wanted], logits_SV[indices_N])


def sampled_logprobs(kept: KeptLogits, token_ids_S: Int64Array) -> Iterator[tuple[int, TokenLogprobs]]:
    """(index among the S rows, log-probabilities of the one token that it sampled); nothing for a row that failed."""
    num_top, asked_ids = _widths(kept.requests)
    columns = _columns(kept.logits_NV, token_ids_S[kept.indices_N], num_top, asked_ids)
    for i, (index, request) in enumerate(zip(kept.indices_N, kept.requests, strict=True)):
        if token_ids_S[index] >= 0:
            yield index, _cut(columns, slice(i, i + 1), request)


def _widths(requests: list[LogprobReq]) -> tuple[int, Int64Array]:
    """K, and the ids that each request asks for: [requests, A], filled up with token 0."""
    asked_ids = np.zeros((len(requests), max(len(request.token_ids) for request in requests)), np.int64)
    for i, request in enumerate(requests):
        asked_ids[i, : len(request.token_ids)] = request.token_ids
    return max(request.num_top for request in requests), asked_ids


def _columns(logits_NV: torch.Tensor, labels_N: Int64Array, num_top: int, asked_ids_NA: Int64Array) -> Columns:
    """What the logits say of the labels, the likeliest tokens and the asked ones."""
    device, vocab_size = logits_NV.device, logits_NV.shape[1]
    num_top = min(max(num_top, 1), vocab_size)  # the first of them tells the sum of all
    found = token_logprobs(logits_NV, torch.from_numpy(labels_N).to(device), num_top)
    logprobs_N, top_ids_NK, top_NK = found
    asked_NA = torch.zeros(asked_ids_NA.shape, device=device)
    if asked_ids_NA.shape[1]:
        top_logits_N = logits_NV.gather(1, top_ids_NK[:, :1].clamp(min=0)).double()
        asked_logits_NA = logits_NV.gather(1, torch.from_numpy(asked_ids_NA).to(device)).double()
        asked_NA = (asked_logits_NA - top_logits_N + top_NK[:, :1].double()).float()
    return [x.cpu().numpy() for x in (logprobs_N, top_ids_NK.int(), top_NK, asked_NA)]


def _cut(columns: Columns, span: slice, request: LogprobReq) -> TokenLogprobs:
    """The part of some rows, as wide as their request wants it."""
    logprobs, top_ids, top_logprobs, asked = columns
    return TokenLogprobs(
        logprobs[span].tobytes(),
        top_ids[span, : request.num_top].tobytes(),
        top_logprobs[span, : request.num_top].tobytes(),
        asked[span, : len(request.token_ids)].tobytes(),
    )
