"""Causal attention of new queries over a paged KV cache: one query a request (decode), or several (extend).

T queries, R requests, H query heads, G KV heads (H a multiple of G), D head dim, P pages of the longest page table.

`kv_lens_R[r]` tokens of request r, its queries' own included, lie on the pages `page_table_RP[r]`; entries behind its
last page are not read. The queries are the last of them. A query sees the keys up to its own position; with
`sliding_window` W only the last W of them, its own included. Scores are q.k * scale, then
soft_cap * tanh(score / soft_cap) where `soft_cap` is given. Page tables, lengths and starts are int32.
"""

import ctypes

import torch

from .catalogue import operator
from .kv_cache import KVCache, gather_kv
from .native import FLOAT, INT64, POINTER, are_heads_adjacent, find_typed, is_int32_table, launch, needs_code, new_empty

HEAD_DIM_STEP = 16  # the C version takes head dims in steps of this
SPLIT, MAX_SPLITS = 512, 16  # of cpu_attention_plan.h


@operator
def extend_attention(
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
    """Outputs [T, H, D] in q's dtype, accumulated in fp32, of queries query_starts[r]..query_starts[r + 1] ([R + 1]).

    Each request has its own cached prefix; some may have no query. Prefill chunks and the verification of several draft
    tokens a request are both this.
    """
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for row, kv_len in enumerate(kv_lens_R.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end or kv_len == 0:
            continue
        num_pages = -(-kv_len // cache.page_size)
        k, v = gather_kv(cache, page_table_RP[row, :num_pages].long(), kv_len)
        hidden = _hidden(end - start, kv_len, sliding_window, q_THD.device)
        out_THD[start:end] = _attend(q_THD[start:end], k, v, hidden, scale, soft_cap)
    return out_THD


@operator
def decode_attention(
    q_RHD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Outputs [R, H, D] in q's dtype, accumulated in fp32, of one query a request; zeros where kv_lens is 0."""
    query_starts = torch.arange(q_RHD.shape[0] + 1, dtype=torch.int32, device=q_RHD.device)
    tables = (page_table_RP, query_starts, kv_lens_R)
    return extend_attention.reference(
        q_RHD, cache, *tables, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )


def _hidden(num_queries: int, kv_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """bool [num_queries, kv_len]: the keys that a query does not see."""
    query = torch.arange(kv_len - num_queries, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    hidden = key > query
    return hidden if sliding_window is None else hidden | (key <= query - sliding_window)


def _attend(
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


class AttentionArgs(ctypes.Structure):
    """attention_args of cpu_attention_plan.h."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k_cache", "v_cache", "out", "partials")),
        *((name, POINTER) for name in ("page_table", "query_starts", "kv_lens")),
        *((name, INT64) for name in ("num_requests", "num_heads", "num_kv_heads", "head_dim", "page_size")),
        *((name, INT64) for name in ("table_stride", "q_stride", "max_splits", "window")),
        *((name, FLOAT) for name in ("scale", "soft_cap")),
    )


def _can_attend(q_THD: torch.Tensor, cache: KVCache, *tables: torch.Tensor) -> bool:
    return (
        find_typed("cpu_operators", "paged_attention", q_THD) is not None
        and q_THD.dtype == cache.k.dtype
        and cache.head_dim % HEAD_DIM_STEP == 0
        and are_heads_adjacent(q_THD)
        and all(is_int32_table(table) for table in tables)
    )


def _can_extend(
    q_THD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens_R: torch.Tensor,
    **_: float | None,
) -> bool:
    return _can_attend(q_THD, cache, page_table_RP, query_starts, kv_lens_R)


def _can_decode(
    q_RHD: torch.Tensor, cache: KVCache, page_table_RP: torch.Tensor, kv_lens_R: torch.Tensor, **_: float | None
) -> bool:
    return _can_attend(q_RHD, cache, page_table_RP, kv_lens_R)


@extend_attention.version("c", takes=_can_extend, why_not=needs_code("cpu_operators"))
def extend_attention_c(
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
    """bf16 and fp32 on CPU, a cache of the same type, head dims in steps of 16; tokens of q may be apart."""
    return _launch(q_THD, cache, (page_table_RP, query_starts, kv_lens_R), (scale, sliding_window, soft_cap))


@decode_attention.version("c", takes=_can_decode, why_not=needs_code("cpu_operators"))
def decode_attention_c(
    q_RHD: torch.Tensor,
    cache: KVCache,
    page_table_RP: torch.Tensor,
    kv_lens_R: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """bf16 and fp32 on CPU, a cache of the same type, head dims in steps of 16; tokens of q may be apart."""
    return _launch(q_RHD, cache, (page_table_RP, None, kv_lens_R), (scale, sliding_window, soft_cap))


def _launch(
    q_THD: torch.Tensor,
    cache: KVCache,
    tables: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    scores: tuple[float, int | None, float | None],
) -> torch.Tensor:
    """`tables`: pages, starts, lengths. `scores`: scale, window, cap."""
    page_table_RP, query_starts, kv_lens_R = tables
    scale, sliding_window, soft_cap = scores
    num_tokens, num_heads, head_dim = q_THD.shape
    max_splits = min(MAX_SPLITS, -(-page_table_RP.shape[1] * cache.page_size // SPLIT))
    out_THD = new_empty(q_THD.shape, q_THD.dtype)
    partials = new_empty((num_tokens * max_splits if max_splits > 1 else 0, num_heads, head_dim + 2), torch.float32)
    pointers = (x.data_ptr() for x in (q_THD, cache.k, cache.v, out_THD, partials, page_table_RP))
    more_pointers = (None if query_starts is None else query_starts.data_ptr(), kv_lens_R.data_ptr())
    sizes = (kv_lens_R.shape[0], num_heads, cache.num_kv_heads, head_dim, cache.page_size, page_table_RP.stride(0))
    args = AttentionArgs(
        *pointers, *more_pointers, *sizes, q_THD.stride(0), max_splits, sliding_window or 0, scale, soft_cap or 0.0
    )
    launch(find_typed("cpu_operators", "paged_attention", q_THD), args)
    return out_THD
