"""Random inputs for every operator that has a C version, edges included: what the comparison tests enumerate.

A case is (dtype, seed) -> outputs of the public function, run with whatever backend is set.
"""

import random
from collections.abc import Callable

import torch

from millstream.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from millstream.kernels.attention import paged_attention
from millstream.kernels.kv_cache import KVCache, alloc_kv_cache, gather_kv_torch, write_kv_torch
from millstream.kernels.rms_norm import add_rms_norm, rms_norm
from millstream.kernels.rotary import rotary_and_store

Outputs = tuple[torch.Tensor, ...]
Case = Callable[[torch.dtype, int], Outputs]
PAGE_SIZES = (1, 2, 8, 16, 32, 64)
HEAD_DIMS = (16, 64, 80, 96, 112, 128, 256)
NUM_TOKENS = (0, 1, 2, 7, 130)


def attention_case(dtype: torch.dtype, seed: int) -> Outputs:
    """A mixed batch: idle rows, decodes, chunks, lengths around page and tile borders, windows and soft caps."""
    choose = random.Random(seed)
    page_size, head_dim = choose.choice(PAGE_SIZES), choose.choice(HEAD_DIMS)
    group, num_kv_heads = choose.randint(1, 8), choose.randint(1, 3)
    edges = (1, page_size, page_size + 1, 16, 17, 64, 65, 511, 513, choose.randint(1, 1200))
    kv_lens = [choose.choice(edges) for _ in range(choose.randint(0, 4))]
    counts = [choose.choice((0, 1, 1, min(2, n), min(40, n), n)) for n in kv_lens]
    return (
        attend(
            dtype,
            seed,
            kv_lens=kv_lens,
            counts=counts,
            page_size=page_size,
            shape=(num_kv_heads * group, num_kv_heads, head_dim),
            sliding_window=choose.choice((None, None, 1, 16, 100)),
            soft_cap=choose.choice((None, None, 5.0)),
        ),
    )


def attend(
    dtype: torch.dtype,
    seed: int,
    *,
    kv_lens: list[int],
    counts: list[int],
    page_size: int,
    shape: tuple[int, int, int],
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of random requests; all slots that belong to no token hold NaN, page ids past the end are invalid."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = shape
    cache, page_table = random_cache(dtype, generator, kv_lens, page_size, (num_kv_heads, head_dim))
    fused = torch.randn(sum(counts), num_heads + 2, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    scale = head_dim**-0.5
    kwargs = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    return paged_attention(fused[:, :num_heads], cache, page_table, starts, lens, **kwargs)


def random_cache(
    dtype: torch.dtype, generator: torch.Generator, kv_lens: list[int], page_size: int, shape: tuple[int, int]
) -> tuple[KVCache, torch.Tensor]:
    """A cache with random tokens on shuffled pages, and NaN wherever there is none."""
    num_pages = [-(-n // page_size) for n in kv_lens]
    cache = alloc_kv_cache(sum(num_pages) + 1, page_size, *shape, dtype, "cpu")
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    order = torch.randperm(sum(num_pages) + 1, generator=generator).int()
    page_table = torch.full((len(kv_lens), max(num_pages, default=0) + 2), -(2**30), dtype=torch.int32)
    first = 0
    for row, (kv_len, count) in enumerate(zip(kv_lens, num_pages, strict=True)):
        page_table[row, :count] = order[first : first + count]
        first += count
        position = torch.arange(kv_len)
        k, v = torch.randn(2, kv_len, *shape, generator=generator).to(dtype)
        write_kv_torch(cache, k, v, page_table[row, position // page_size].long(), position % page_size)
    return cache, page_table


def rotary_case(dtype: torch.dtype, seed: int) -> Outputs:
    """Tokens of two requests as views of one fused projection; the whole cache is compared."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    page_size, head_dim = choose.choice(PAGE_SIZES), choose.choice((*HEAD_DIMS, 6, 10))
    rotary_dim = choose.choice((head_dim, head_dim // 4 * 2))
    num_tokens, num_heads, num_kv_heads = choose.choice(NUM_TOKENS), choose.randint(1, 9), choose.randint(1, 3)
    pages_each = 150 // page_size + 1
    cache = alloc_kv_cache(2 * pages_each, page_size, num_kv_heads, head_dim, dtype, "cpu")
    page_table = torch.randperm(2 * pages_each, generator=generator).int().view(2, pages_each)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    angle = torch.rand(num_tokens, rotary_dim // 2, generator=generator).repeat(1, 2) * 6
    rows = (torch.arange(num_tokens) % 2).int()
    positions = (torch.arange(num_tokens) // 2 + 5).int()
    rotary_and_store(q, k, v, angle.cos(), angle.sin(), cache, page_table, rows, positions)
    stored = [gather_kv_torch(cache, page_table[row].long(), pages_each * page_size) for row in range(2)]
    return (fused, *stored[0], *stored[1])


def rows_case(dtype: torch.dtype, seed: int, num_features: int) -> tuple[torch.Tensor, random.Random]:
    """Random rows of some width, with a large spread."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(choose.choice(NUM_TOKENS), num_features, generator=generator) * choose.choice((0.01, 1, 8))
    return x.to(dtype), choose


def rms_norm_case(dtype: torch.dtype, seed: int) -> Outputs:
    """Widths on and off the vector size; weights of both types."""
    num_features = random.Random(seed + 99).choice((1, 15, 64, 576, 2049))
    x, choose = rows_case(dtype, seed, num_features)
    weight = torch.linspace(-2, 2, num_features).to(choose.choice((dtype, torch.float32)))
    return (rms_norm(x, weight, 1e-5), rms_norm(x[None, ::2], weight, 1e-6))


def add_rms_norm_case(dtype: torch.dtype, seed: int) -> Outputs:
    """The residual is an output too."""
    num_features = random.Random(seed + 99).choice((1, 15, 64, 576, 2049))
    x, choose = rows_case(dtype, seed, num_features)
    residual = torch.flip(x, (0,)) * 2
    weight = torch.linspace(-2, 2, num_features).to(choose.choice((dtype, torch.float32)))
    return (add_rms_norm(x, residual, weight, 1e-5), residual)


def silu_case(dtype: torch.dtype, seed: int) -> Outputs:
    """Both halves from one random tensor."""
    return (silu_and_mul(rows_case(dtype, seed, 2 * random.Random(seed).choice((1, 17, 64, 1536)))[0]),)


def gelu_case(dtype: torch.dtype, seed: int) -> Outputs:
    """Both halves from one random tensor."""
    return (gelu_tanh_and_mul(rows_case(dtype, seed, 2 * random.Random(seed).choice((1, 17, 64, 1536)))[0]),)


CASES: dict[str, Case] = {
    "paged_attention": attention_case,
    "rotary_and_store": rotary_case,
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "silu_and_mul": silu_case,
    "gelu_tanh_and_mul": gelu_case,
}
