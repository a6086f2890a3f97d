"""One vector of a prompt: the last token's hidden state or the mean of all, scaled to the length 1.

The states are those after the final norm; N of them are wanted in a step, F hidden size. A prompt that is computed in
chunks is summed up in float32.
"""

from typing import NamedTuple

import numpy as np
import torch

from .rows import Int64Array, Rows
from .step import Step


class PoolingPart(NamedTuple):
    """A row's positions of this step whose hidden states are wanted; `is_last` where they are the prompt's last ones."""

    row: int
    indices: Int64Array  # of the T tokens
    is_last: bool


def pooling_parts(rows: Rows, step: Step) -> list[PoolingPart]:
    """The positions that rows with pooling compute in this step, by row: those that count for their vector."""
    if not rows.pooling:
        return []
    parts = []
    for chunk in step.chunks():
        wanted = rows.pooling.get(chunk.row)
        if wanted is None:
            continue
        start, end = chunk.first, chunk.first + chunk.end - chunk.start
        is_last = chunk.end == wanted.prompt_len
        if wanted.is_mean or is_last:
            indices = np.arange(start if wanted.is_mean else end - 1, end, dtype=np.int64)
            parts.append(PoolingPart(chunk.row, indices, is_last))
    return parts


def pool(rows: Rows, parts: list[PoolingPart], hidden_NF: torch.Tensor) -> dict[int, bytes]:
    """float32 [F] of each row whose prompt is complete; nothing where a state is missing or not finite."""
    found = {}
    start = 0
    for part in parts:
        total = rows.pooling[part.row]
        end = start + len(part.indices)
        total.sum_F = total.sum_F + hidden_NF[start:end].float().sum(0).cpu().numpy()
        total.num_left -= end - start
        length = float(np.linalg.norm(total.sum_F))
        if part.is_last and total.num_left == 0 and 0 < length < np.inf:
            found[part.row] = (total.sum_F / length).astype(np.float32).tobytes()
        start = end
    return found
