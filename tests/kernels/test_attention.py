"""Attention: against PyTorch's own, and the invariances that the scheduler relies on."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from millstream.kernels.attention import decode_attention, extend_attention
from millstream.kernels.backend import set_backend
from millstream.kernels.kv_cache import alloc_kv_cache, gather_kv, page_bytes
from tests.kernels.attention_cases import random_cache

SHAPE = (9, 3, 64)
SCALE = 0.125


def extend(
    dtype: torch.dtype,
    kv_lens: Sequence[int],
    counts: Sequence[int],
    shape: tuple[int, int, int] = SHAPE,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention of random requests."""
    generator = torch.Generator().manual_seed(1)
    cache, page_table = random_cache(dtype, generator, kv_lens, 16, shape[1:])
    q = torch.randn(sum(counts), shape[0], shape[2], generator=generator).to(dtype)
    starts, lens = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(kv_lens).int()
    return extend_attention(q, cache, page_table, starts, lens, scale=SCALE, sliding_window=sliding_window)


def whole_prompt(kv_len: int, counts: Sequence[int]) -> torch.Tensor:
    """Outputs of one prompt of `kv_len` tokens, computed in chunks of `counts` queries."""
    generator = torch.Generator().manual_seed(3)
    cache, page_table = random_cache(torch.float32, generator, [kv_len], 16, SHAPE[1:])
    q = torch.randn(kv_len, SHAPE[0], SHAPE[2], generator=generator)
    outs, end = [], 0
    for count in counts:
        start, end = end, end + count
        lens = torch.tensor([end]).int()
        if count == 1:
            outs.append(decode_attention(q[start:end], cache, page_table, lens, scale=SCALE))
        else:
            starts = torch.tensor([0, count]).int()
            outs.append(extend_attention(q[start:end], cache, page_table, starts, lens, scale=SCALE))
    return torch.cat(outs)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_attention_is_pytorchs(backend: str) -> None:
    set_backend("torch" if backend == "torch" else "auto")
    generator = torch.Generator().manual_seed(0)
    cache, page_table = random_cache(torch.float32, generator, [300], 16, SHAPE[1:])
    q = torch.randn(300, SHAPE[0], SHAPE[2], generator=generator)
    starts, lens = torch.tensor([0, 300]).int(), torch.tensor([300]).int()
    out = extend_attention(q, cache, page_table, starts, lens, scale=SCALE)
    k, v = gather_kv(cache, page_table[0, :19].long(), 300)
    heads = (x.permute(1, 0, 2)[None] for x in (q, k, v))
    expected = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True, scale=SCALE)[0].permute(1, 0, 2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    last = decode_attention(q[-1:], cache, page_table, lens, scale=SCALE)
    torch.testing.assert_close(last, expected[-1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[130, 1, 469], [1] * 20 + [580], [64] * 9 + [24]])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(counts: list[int]) -> None:
    torch.testing.assert_close(whole_prompt(600, counts), whole_prompt(600, [600]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 700])
def test_keys_beyond_the_most_splits_are_seen(sliding_window: int | None) -> None:
    kv_lens, counts = [9001, 600, 20000], [1, 2, 3]
    out = extend(torch.float32, kv_lens, counts, (2, 1, 16), sliding_window)
    set_backend("torch")
    expected = extend(torch.float32, kv_lens, counts, (2, 1, 16), sliding_window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    kv_lens, counts = [700, 33, 1500, 90], [1, 20, 1, 90]
    cache, page_table = random_cache(dtype, generator, kv_lens, 16, SHAPE[1:])
    q = torch.randn(sum(counts), SHAPE[0], SHAPE[2], generator=generator).to(dtype)
    starts, lens = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(kv_lens).int()
    together = extend_attention(q, cache, page_table, starts, lens, scale=SCALE)
    for row, count in enumerate(counts):
        own = slice(int(starts[row]), int(starts[row + 1]))
        operands = (q[own], cache, page_table[row : row + 1])
        alone = extend_attention(*operands, torch.tensor([0, count]).int(), lens[row : row + 1], scale=SCALE)
        assert torch.equal(alone, together[own])
        if count == 1:
            assert torch.equal(decode_attention(*operands, lens[row : row + 1], scale=SCALE), alone)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    alone = extend(torch.bfloat16, [2000, 40, 300], [1, 7, 300], (8, 2, 64))
    torch.set_num_threads(2)
    assert torch.equal(extend(torch.bfloat16, [2000, 40, 300], [1, 7, 300], (8, 2, 64)), alone)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_query_with_nan_spoils_no_other_row(backend: str) -> None:
    set_backend("torch" if backend == "torch" else "auto")
    generator = torch.Generator().manual_seed(6)
    cache, page_table = random_cache(torch.float32, generator, [100], 16, SHAPE[1:])
    q = torch.randn(5, SHAPE[0], SHAPE[2], generator=generator)
    q[2, 4, 7] = float("nan")
    starts, lens = torch.tensor([0, 5]).int(), torch.tensor([100]).int()
    is_spoilt = extend_attention(q, cache, page_table, starts, lens, scale=SCALE).isnan().any(dim=-1)
    assert is_spoilt.sum() == 1
    assert is_spoilt[2, 4]


@pytest.mark.parametrize("head_dim", [8, 24])
def test_head_dims_that_c_does_not_take_still_work(head_dim: int) -> None:
    out = extend(torch.float32, [20], [20], (2, 1, head_dim))
    assert out.shape == (20, 2, head_dim)
    assert out.isfinite().all()


def test_page_bytes_is_what_a_page_takes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = alloc_kv_cache(3, 16, 2, 64, dtype, "cpu")
        assert cache.num_pages == 3
        assert cache.k.nbytes + cache.v.nbytes == 3 * page_bytes(16, 2, 64, dtype)


@pytest.mark.parametrize(("page_size", "head_dim"), [(0, 64), (3, 64), (16, 63)])
def test_sizes_that_have_no_layout_are_refused(page_size: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        alloc_kv_cache(1, page_size, 1, head_dim, torch.float32, "cpu")
