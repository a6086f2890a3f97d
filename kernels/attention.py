"""Causal attention of new queries over a paged KV cache: decode and prefill chunks in one contract.

T queries, R requests, H query heads, G KV heads (H a multiple of G), D head dim, P pages of the longest page table.
"""

import ctypes
import functools

import torch

from .kv_cache import KVCache, gather_kv_torch
from .native import FLOAT, INT64, POINTER, Operator, are_heads_adjacent, as_int32, find_operator

HEAD_DIM_STEP = 16  # the C version takes head dims in steps of this; torch's takes the others


def paged_attention(
    q_THD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention outputs [T, H, D] in q's dtype, accumulated in fp32.

    Queries `query_starts[r]` to `query_starts[r + 1]` (int32 [R + 1]) are the last positions of request r, whose
    `kv_lens_R[r]` tokens, the queries' own included, lie on the pages `page_table_RP[r]` (int32; entries past the last
    page are not read). A query sees the keys up to its own position; with `sliding_window` W only the last W of them,
    its own included. Scores are q.k * scale, then soft_cap * tanh(score / soft_cap) where `soft_cap` is given.
    """
    operator = find_operator("paged_attention", q_THD)
    if operator is None or cache.head_dim % HEAD_DIM_STEP:
        attend = paged_attention_torch
    else:
        attend = functools.partial(_paged_attention_native, operator)
    sizes = (page_table_RP, query_starts, kv_lens_R)
    return attend(q_THD, cache, *sizes, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)


class AttentionArgs(ctypes.Structure):
    """attention_args of cpu_attention_plan.h."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k_cache", "v_cache", "out", "page_table", "query_starts", "kv_lens")),
        *((name, INT64) for name in ("num_requests", "num_heads", "num_kv_heads", "head_dim", "page_size")),
        *((name, INT64) for name in ("max_pages", "q_stride", "window")),
        *((name, FLOAT) for name in ("scale", "soft_cap")),
        ("num_threads", INT64),
    )


def _paged_attention_native(
    operator: Operator,
    q_THD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The C version: an online softmax over tiles of keys, read where they lie."""
    assert q_THD.dtype == cache.k.dtype
    q = q_THD if are_heads_adjacent(q_THD) else q_THD.contiguous()
    out_THD = torch.empty_like(q, memory_format=torch.contiguous_format)
    page_table, starts, kv_lens = as_int32(page_table_RP), as_int32(query_starts), as_int32(kv_lens_R)
    tensors = (q, cache.k, cache.v, out_THD, page_table, starts, kv_lens)
    sizes = (kv_lens.shape[0], q.shape[1], cache.num_kv_heads, cache.head_dim, cache.page_size, page_table.shape[1])
    args = AttentionArgs(
        *(x.data_ptr() for x in tensors),
        *sizes,
        q.stride(0),
        sliding_window or 0,
        scale,
        soft_cap or 0.0,
        torch.get_num_threads(),
    )
    if operator(ctypes.byref(args)) != 0:
        raise MemoryError("paged_attention: no memory for its work items")
    return out_THD


def paged_attention_torch(
    q_THD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The reference: gathers the pages of one request after the other."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    starts, kv_lens = query_starts.tolist(), kv_lens_R.tolist()
    for row, kv_len in enumerate(kv_lens):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        num_pages = -(-kv_len // cache.page_size)
        k, v = gather_kv_torch(cache, page_table_RP[row, :num_pages].long(), kv_len)
        hidden = _hidden_torch(end - start, kv_len, sliding_window, q_THD.device)
        out_THD[start:end] = _attend_torch(q_THD[start:end], k, v, hidden, scale, soft_cap)
    return out_THD


def _hidden_torch(num_queries: int, kv_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """bool [num_queries, kv_len]: the keys that a query does not see."""
    query = torch.arange(kv_len - num_queries, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    hidden = key > query
    return hidden if sliding_window is None else hidden | (key <= query - sliding_window)


def _attend_torch(
    q_QHD: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    hidden_QL: torch.Tensor,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    num_queries, num_heads, head_dim = q_QHD.shape
    num_kv_heads = k_LGD.shape[1]
    q = q_QHD.float().reshape(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    k, v = k_LGD.float().permute(1, 2, 0)[:, None], v_LGD.float().permute(1, 0, 2)[:, None]
    scores = torch.matmul(q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(hidden_QL, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights, v).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q_QHD.dtype)
