"""Rows of tables: the vocabulary-parallel embedding, and the rows of a step that sample.

T tokens, V rows of this rank's part of the vocabulary, F features, S selected rows.
"""

import ctypes

import torch

from .catalogue import operator
from .native import FLOAT, INT64, POINTER, find_typed, launch, needs_code, new_empty


@operator
def embed(token_ids_T: torch.Tensor, table_VF: torch.Tensor, first_id: int, scale: float) -> torch.Tensor:
    """table[id - first_id] * scale, [T, F] in the table's dtype, rounded once.

    An id (int64) outside [first_id, first_id + V) is another rank's and gives zeros, so that the sum over the ranks is
    the embedding.
    """
    local_T = token_ids_T - first_id
    is_elsewhere_T = (local_T < 0) | (local_T >= table_VF.shape[0])
    x_TF = table_VF[local_T.masked_fill(is_elsewhere_T, 0)] * scale
    return x_TF.masked_fill(is_elsewhere_T[:, None], 0.0)


@operator
def select_rows(x_TF: torch.Tensor, indices_S: torch.Tensor) -> torch.Tensor:
    """x[indices], [S, F]; the indices are int64 in [0, T)."""
    return x_TF[indices_S]


class RowsArgs(ctypes.Structure):
    """rows_args of cpu_elementwise.h."""

    _fields_ = (
        *((name, POINTER) for name in ("out", "table", "ids")),
        *((name, INT64) for name in ("num_ids", "first_id", "num_rows", "size")),
        ("scale", FLOAT),
    )


def _can_take_rows(ids: torch.Tensor, table: torch.Tensor) -> bool:
    return (
        find_typed("cpu_operators", "take_rows", table) is not None
        and table.dim() == 2
        and table.is_contiguous()
        and ids.dim() == 1
        and ids.is_contiguous()
        and ids.dtype == torch.int64
    )


def _can_embed(token_ids_T: torch.Tensor, table_VF: torch.Tensor, first_id: int, scale: float) -> bool:
    return _can_take_rows(token_ids_T, table_VF)


def _can_select(x_TF: torch.Tensor, indices_S: torch.Tensor) -> bool:
    return _can_take_rows(indices_S, x_TF)


@embed.version("c", takes=_can_embed, why_not=needs_code("cpu_operators"))
def embed_c(token_ids_T: torch.Tensor, table_VF: torch.Tensor, first_id: int, scale: float) -> torch.Tensor:
    """bf16 and fp32 on CPU, contiguous."""
    return _take_rows(token_ids_T, table_VF, first_id, scale)


@select_rows.version("c", takes=_can_select, why_not=needs_code("cpu_operators"))
def select_rows_c(x_TF: torch.Tensor, indices_S: torch.Tensor) -> torch.Tensor:
    """bf16 and fp32 on CPU, contiguous."""
    return _take_rows(indices_S, x_TF, 0, 1.0)


def _take_rows(ids: torch.Tensor, table: torch.Tensor, first_id: int, scale: float) -> torch.Tensor:
    num_rows, size = table.shape
    out = new_empty((ids.shape[0], size), table.dtype)
    pointers = (x.data_ptr() for x in (out, table, ids))
    launch(
        find_typed("cpu_operators", "take_rows", table),
        RowsArgs(*pointers, ids.shape[0], first_id, num_rows, size, scale),
    )
    return out
