"""Rotary embedding of queries and keys, fused with the store of keys and values into their pages; its tables.

T tokens, H query heads, G KV heads, D head dim, R requests, P pages of the longest page table, C pairs of the rotated
part (half of the rotary dimensions, <= D / 2).
"""

import ctypes

import torch

from .backend import find_function
from .catalogue import operator
from .kv_cache import KVCache, write_kv
from .native import FLOAT, INT64, POINTER, are_heads_adjacent, find_typed, is_int32_table, launch, needs_code, new_empty


@operator
def rotary_tables(
    positions_T: torch.Tensor, inv_freq_C: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos_TC, sin_TC) of position * inv_freq in float32, times `attention_factor`; positions are int32."""
    angles_TC = positions_T.float()[:, None] * inv_freq_C
    return angles_TC.cos() * attention_factor, angles_TC.sin() * attention_factor


@operator
def rotary_and_store(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """Rotate q and k in place, then write k and v of every token to the page slot of its position.

    cos, sin: float32, from `rotary_tables`; a head's first C elements and the C behind them form the pairs (NeoX), the
    rest passes unchanged. Token t belongs to row `row_of_T[t]` of `page_table_RP` and lies at `positions_T[t]` (all
    int32). q, k and v may be views whose tokens are apart. fp32 arithmetic, rounded once.
    """
    _rotate(q_THD, cos_TC, sin_TC)
    _rotate(k_TGD, cos_TC, sin_TC)
    positions = positions_T.long()
    page_T = page_table_RP[row_of_T.long(), positions // cache.page_size].long()
    write_kv(cache, k_TGD, v_TGD, page_T, positions % cache.page_size)


def _rotate(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> None:
    half = cos_TC.shape[1]
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    low, high = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    rotated_low, rotated_high = low * cos - high * sin, high * cos + low * sin  # both before x, which fp32 aliases
    x_THD[..., :half] = rotated_low
    x_THD[..., half : 2 * half] = rotated_high


class TablesArgs(ctypes.Structure):
    """tables_args of cpu_rotary_tables.c."""

    _fields_ = (
        *((name, POINTER) for name in ("cos", "sin", "positions", "inv_freq")),
        *((name, INT64) for name in ("num_tokens", "num_pairs")),
        ("factor", FLOAT),
    )


class RotaryArgs(ctypes.Structure):
    """rotary_args of cpu_elementwise.h."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k", "v", "k_cache", "v_cache", "cos", "sin")),
        *((name, POINTER) for name in ("page_table", "row_of", "positions")),
        *((name, INT64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "num_pairs")),
        *((name, INT64) for name in ("page_size", "table_stride", "q_stride", "k_stride", "v_stride")),
    )


def _can_make_tables(positions_T: torch.Tensor, inv_freq_C: torch.Tensor, attention_factor: float) -> bool:
    return (
        inv_freq_C.device.type == "cpu"
        and inv_freq_C.dtype == torch.float32
        and inv_freq_C.is_contiguous()
        and is_int32_table(positions_T)
        and find_function("cpu_rotary_tables.c", "rotary_tables") is not None
    )


@rotary_tables.version("c", takes=_can_make_tables, why_not=needs_code("cpu_rotary_tables.c"))
def rotary_tables_c(
    positions_T: torch.Tensor, inv_freq_C: torch.Tensor, attention_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 positions and fp32 frequencies on CPU."""
    shape = (positions_T.shape[0], inv_freq_C.shape[0])
    cos_TC, sin_TC = (new_empty(shape, torch.float32) for _ in range(2))
    pointers = (x.data_ptr() for x in (cos_TC, sin_TC, positions_T, inv_freq_C))
    args = TablesArgs(*pointers, *shape, attention_factor)
    launch(find_function("cpu_rotary_tables.c", "rotary_tables"), args)
    return cos_TC, sin_TC


def _can_store(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> bool:
    return (
        find_typed("cpu_operators", "rotary_and_store", q_THD) is not None
        and q_THD.dtype == k_TGD.dtype == v_TGD.dtype == cache.k.dtype
        and all(are_heads_adjacent(x) for x in (q_THD, k_TGD, v_TGD))
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in (cos_TC, sin_TC))
        and all(is_int32_table(x) for x in (page_table_RP, row_of_T, positions_T))
    )


@rotary_and_store.version("c", takes=_can_store, why_not=needs_code("cpu_operators"))
def rotary_and_store_c(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """bf16 and fp32 on CPU, a cache of the same type; heads of a token adjacent, tokens may be apart."""
    tensors = (q_THD, k_TGD, v_TGD, cache.k, cache.v, cos_TC, sin_TC, page_table_RP, row_of_T, positions_T)
    sizes = (*q_THD.shape[:2], k_TGD.shape[1], q_THD.shape[2], cos_TC.shape[1])
    strides = (cache.page_size, page_table_RP.stride(0), q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0))
    launch(
        find_typed("cpu_operators", "rotary_and_store", q_THD),
        RotaryArgs(*(x.data_ptr() for x in tensors), *sizes, *strides),
    )
