"""Cases of paged attention. All slots that belong to no token hold NaN; page ids behind a request's last are invalid."""

import random
from collections.abc import Sequence

import torch

from millstream.kernels.kv_cache import KVCache, alloc_kv_cache, write_kv
from tests.kernels.operator_cases import Call, Draw, call, cases

PAGE_SIZES = (1, 2, 8, 16, 32, 64)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 16)
MAX_GROUP = 8
WINDOWS = (None, 16, None, 1, 100)
SOFT_CAPS = (None, None, 5.0)
MAX_LEN = 600  # more than one split of the keys
NO_PAGE = -(2**30)


def random_cache(
    dtype: torch.dtype, generator: torch.Generator, kv_lens: Sequence[int], page_size: int, shape: tuple[int, int]
) -> tuple[KVCache, torch.Tensor]:
    """Random tokens on shuffled pages, and the page table: as large for shorter lengths as for 5 of MAX_LEN."""
    pages_each = -(-max((MAX_LEN, *kv_lens)) // page_size)
    cache = alloc_kv_cache(max(5, len(kv_lens)) * pages_each, page_size, *shape, dtype, "cpu")
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    order = torch.randperm(cache.num_pages, generator=generator).int()
    page_table = torch.full((len(kv_lens), pages_each + 1), NO_PAGE, dtype=torch.int32)
    for row, kv_len in enumerate(kv_lens):
        pages, order = order[: -(-kv_len // page_size)], order[-(-kv_len // page_size) :]
        page_table[row, : len(pages)] = pages
        position = torch.arange(kv_len)
        k, v = torch.randn(2, kv_len, *shape, generator=generator).to(dtype)
        write_kv(cache, k, v, pages[position // page_size].long(), position % page_size)
    return cache, page_table


def random_lens(values: random.Random, page_size: int, num_requests: int) -> list[int]:
    """One token, an exact page, one over; then tile and split borders, and whatever comes."""
    others = [values.choice((16, 17, 64, 65, 511, 512, 513, values.randint(1, MAX_LEN))) for _ in range(num_requests)]
    kv_lens = [1, page_size, page_size + 1, *others][:num_requests]
    values.shuffle(kv_lens)
    return kv_lens


def scores_of(draw: Draw, head_dim: int) -> dict[str, object]:
    """The keywords of both operators."""
    spread = (1, 8)[draw.seed % 2]  # 8: maxima rise a lot from tile to tile
    window, soft_cap = WINDOWS[draw.seed % len(WINDOWS)], SOFT_CAPS[draw.seed % len(SOFT_CAPS)]
    return {"scale": spread * head_dim**-0.5, "sliding_window": window, "soft_cap": soft_cap}


def shape_of(draw: Draw) -> tuple[int, int, int, int]:
    """Page size, query heads, KV heads and head dim; neighbouring seeds walk through all groups and head dims."""
    group, head_dim = draw.seed % MAX_GROUP + 1, HEAD_DIMS[(draw.seed + draw.seed // MAX_GROUP) % len(HEAD_DIMS)]
    num_kv_heads = draw.shapes.randint(1, 3 if head_dim < 100 else 1)
    return draw.shapes.choice(PAGE_SIZES), group * num_kv_heads, num_kv_heads, head_dim


@cases("decode_attention", num_seeds=24)
def decode_case(draw: Draw) -> Call:
    """Up to five requests, one of them empty."""
    page_size, num_heads, num_kv_heads, head_dim = shape_of(draw)
    kv_lens = random_lens(draw.values, page_size, draw.shapes.choice((0, 1, 3, 5)))
    if len(kv_lens) > 3:
        kv_lens[draw.values.randrange(len(kv_lens))] = 0
    cache, page_table = random_cache(draw.dtype, draw.generator, kv_lens, page_size, (num_kv_heads, head_dim))
    q = draw.randn(len(kv_lens), num_heads + 2, head_dim)[:, :num_heads]
    return call(q, cache, page_table, torch.tensor(kv_lens, dtype=torch.int32), **scores_of(draw, head_dim))


@cases("extend_attention", num_seeds=24)
def extend_case(draw: Draw) -> Call:
    """Requests without queries, decodes, verified drafts, chunks behind a cached prefix and whole prompts."""
    page_size, num_heads, num_kv_heads, head_dim = shape_of(draw)
    counts = [draw.shapes.choice((0, 1, 2, 5, 40, 130)) for _ in range(draw.shapes.choice((0, 1, 3, 5)))]
    draw.values.shuffle(counts)
    lens = random_lens(draw.values, page_size, len(counts))
    kv_lens = [draw.values.choice((count, max(count, kv_len))) for count, kv_len in zip(counts, lens, strict=True)]
    cache, page_table = random_cache(draw.dtype, draw.generator, kv_lens, page_size, (num_kv_heads, head_dim))
    q = draw.randn(sum(counts), num_heads + 2, head_dim)[:, :num_heads]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return call(q, cache, page_table, starts, torch.tensor(kv_lens, dtype=torch.int32), **scores_of(draw, head_dim))
