"""The next tokens of the rows that sample: drawn on rank 0, then known to all ranks. S rows, V vocabulary."""

import numpy as np
import torch

from ..kernels.sampling import SamplingTensors, sample
from .communicator import Communicator
from .grammar import Masks
from .rows import Int32Array, Int64Array, Rows


def next_tokens(
    rows: Rows,
    rows_S: Int32Array,
    logits_SV: torch.Tensor | None,
    masks: Masks | None,
    communicator: Communicator,
    device: torch.device,
) -> Int64Array:
    """Token ids [S], the same on every rank; -1 for a row whose logits allow no token. Rank 0 brings the logits."""
    if communicator.rank == 0:
        assert logits_SV is not None
        ids_S = _sample(rows, rows_S, logits_SV, masks)
    else:
        ids_S = torch.empty(len(rows_S), dtype=torch.int64, device=device)
    ids: Int64Array = communicator.broadcast_first(ids_S).cpu().numpy()
    if rows.logit_changes is not None:
        is_token_S = ids >= 0
        rows.logit_changes.add_tokens(rows_S[is_token_S], ids[is_token_S])
    return ids


def _sample(rows: Rows, rows_S: Int32Array, logits_SV: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    """The noise of a token is that of its absolute position: the number of tokens known before it."""
    row_lens_S = rows.row_lens[rows_S].astype(np.int64)
    assert rows.logit_changes is not None
    rows.logit_changes.apply(rows_S, logits_SV)
    rows.logit_changes.forbid_ends(rows_S, row_lens_S, logits_SV)
    if masks is not None:
        masks.apply(logits_SV)
    columns = (rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.seeds)
    params = SamplingTensors(*(torch.from_numpy(column[rows_S]).to(logits_SV.device) for column in columns))
    return sample(logits_SV, params, torch.from_numpy(row_lens_S).to(logits_SV.device))
