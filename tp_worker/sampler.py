"""The next tokens of the rows that sample: drawn on rank 0, then known to all ranks. S rows, V vocabulary."""

import numpy as np
import torch

from ..kernels.logits import TokenLists, apply_logit_bias
from ..kernels.sampling import SamplingTensors, sample
from .communicator import Communicator
from .rows import Int32Array, Int64Array, Rows


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
        pairs = zip(rows_S.tolist(), is_too_short_S.tolist(), strict=True)
        _forbid([rows.end_token_ids[row] if is_too_short else [] for row, is_too_short in pairs], logits_SV)
    columns = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.seeds)
    params = SamplingTensors(*(torch.from_numpy(column[rows_S]).to(logits_SV.device) for column in columns))
    return sample(logits_SV, params, torch.from_numpy(row_lens_S).to(logits_SV.device))


def _forbid(ids_of_S: list[list[int]], logits_SV: torch.Tensor) -> None:
    """Each row's tokens, in place: end tokens before `min_new_tokens`."""
    ends_S = np.cumsum([len(ids) for ids in ids_of_S])
    starts_S = ends_S - [len(ids) for ids in ids_of_S]
    ids_N = [token_id for ids in ids_of_S for token_id in ids]
    columns = (torch.tensor(column, dtype=torch.int32) for column in (starts_S, ends_S, ids_N))
    tokens = TokenLists(*(column.to(logits_SV.device) for column in columns))
    apply_logit_bias(logits_SV, tokens, torch.full((len(ids_N),), float("-inf"), device=logits_SV.device))
