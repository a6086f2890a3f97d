"""The next tokens of the rows that sample: drawn on rank 0, then known to all ranks. S rows, V vocabulary."""

import numpy as np
import torch

from ..kernels.logits import TokenLists, apply_logit_bias
from ..kernels.sampling import SamplingTensors, sample
from .communicator import Communicator
from .rows import BoolArray, Int32Array, Int64Array, Rows


def next_tokens(
    rows: Rows, rows_S: Int32Array, logits_SV: torch.Tensor | None, communicator: Communicator, device: torch.device
) -> Int64Array:
    """Token ids [S], the same on every rank; -1 for a row whose logits allow no token. Rank 0 brings the logits."""
    if communicator.rank == 0:
        assert logits_SV is not None
        ids_S = _sample(rows, rows_S, logits_SV)
    else:
        ids_S = torch.empty(len(rows_S), dtype=torch.int64, device=device)
    ids: Int64Array = communicator.broadcast_first(ids_S).cpu().numpy()
    return ids


def _sample(rows: Rows, rows_S: Int32Array, logits_SV: torch.Tensor) -> torch.Tensor:
    """The noise of a token is that of its absolute position: the number of tokens known before it."""
    row_lens_S = rows.row_lens[rows_S].astype(np.int64)
    is_too_short_S = row_lens_S < rows.unmasked_lens[rows_S]
    if is_too_short_S.any():
        _forbid_end_tokens(rows, rows_S, is_too_short_S, logits_SV)
    columns = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.seeds)
    params = SamplingTensors(*(torch.from_numpy(column[rows_S]).to(logits_SV.device) for column in columns))
    return sample(logits_SV, params, torch.from_numpy(row_lens_S).to(logits_SV.device))


def _forbid_end_tokens(rows: Rows, rows_S: Int32Array, is_too_short_S: BoolArray, logits_SV: torch.Tensor) -> None:
    """Those of the rows that are too short, in place. E is the room for each row's."""
    ids_SE = rows.end_token_ids[rows_S]
    starts_S = np.arange(len(rows_S), dtype=np.int32) * np.int32(ids_SE.shape[1])
    ends_S = starts_S + rows.num_end_token_ids[rows_S] * is_too_short_S
    columns = (torch.from_numpy(column).to(logits_SV.device) for column in (starts_S, ends_S, ids_SE.ravel()))
    biases_N = torch.full((ids_SE.size,), float("-inf"), device=logits_SV.device)
    apply_logit_bias(logits_SV, TokenLists(*columns), biases_N)
