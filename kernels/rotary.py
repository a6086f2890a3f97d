"""Rotary embedding of queries and keys, fused with the store of keys and values into their pages.

T tokens, H query heads, G KV heads, D head dim, R requests, P pages of the longest page table.
"""

import ctypes

import torch

from .kv_cache import KVCache, write_kv_torch
from .native import INT64, POINTER, Operator, are_heads_adjacent, as_int32, find_operator


def rotary_and_store(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """Rotate q and k in place, then write k and v of every token to the page slot of its position.

    cos_TR, sin_TR: float32 [T, rotary_dim], gathered per token, both halves alike (Hugging Face's form; only the first
    half is read); rotary_dim <= D, the rest of a head passes unchanged. The halves of the rotated part form the pairs
    (NeoX). Token t belongs to row `row_of_T[t]` of `page_table_RP` and lies at `positions_T[t]` (both int32).
    q, k and v may be views whose tokens are apart; a head's elements are adjacent. fp32 arithmetic, rounded once.
    """
    arguments = (q_THD, k_TGD, v_TGD, cos_TR, sin_TR, cache, page_table_RP, row_of_T, positions_T)
    operator = find_operator("rotary_and_store", q_THD)
    if operator is None or not all(are_heads_adjacent(x) for x in (q_THD, k_TGD, v_TGD)):
        rotary_and_store_torch(*arguments)
    else:
        _rotary_and_store_native(operator, *arguments)


class RotaryArgs(ctypes.Structure):
    """rotary_args of cpu_operators.c."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k", "v", "k_cache", "v_cache", "cos", "sin")),
        *((name, POINTER) for name in ("page_table", "row_of", "positions")),
        *((name, INT64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, INT64) for name in ("page_size", "max_pages", "q_stride", "k_stride", "v_stride", "num_threads")),
    )


def _rotary_and_store_native(
    operator: Operator,
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """The C version."""
    assert q_THD.dtype == k_TGD.dtype == v_TGD.dtype == cache.k.dtype
    cos, sin = cos_TR.float().contiguous(), sin_TR.float().contiguous()
    page_table, row_of, positions = as_int32(page_table_RP), as_int32(row_of_T), as_int32(positions_T)
    tensors = (q_THD, k_TGD, v_TGD, cache.k, cache.v, cos, sin, page_table, row_of, positions)
    sizes = (*q_THD.shape[:2], k_TGD.shape[1], q_THD.shape[2], cos.shape[1], cache.page_size, page_table.shape[1])
    strides = (q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0))
    args = RotaryArgs(*(x.data_ptr() for x in tensors), *sizes, *strides, torch.get_num_threads())
    operator(ctypes.byref(args))


def rotary_and_store_torch(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    row_of_T: torch.Tensor,
    positions_T: torch.Tensor,
) -> None:
    """The reference."""
    _rotate_torch(q_THD, cos_TR, sin_TR)
    _rotate_torch(k_TGD, cos_TR, sin_TR)
    positions = positions_T.long()
    page_T = page_table_RP[row_of_T.long(), positions // cache.page_size].long()
    write_kv_torch(cache, k_TGD, v_TGD, page_T, positions % cache.page_size)


def _rotate_torch(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> None:
    half = cos_TR.shape[1] // 2
    cos, sin = cos_TR[:, None, :half].float(), sin_TR[:, None, :half].float()
    low, high = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    rotated_low, rotated_high = low * cos - high * sin, high * cos + low * sin  # both before x, which fp32 aliases
    x_THD[..., :half] = rotated_low
    x_THD[..., half : 2 * half] = rotated_high
