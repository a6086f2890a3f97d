"""Attention: against PyTorch's own, and the invariances that the scheduler relies on."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from millstream.kernels.attention import paged_attention
from millstream.kernels.backend import set_backend
from millstream.kernels.kv_cache import alloc_kv_cache, gather_kv_torch, page_bytes
from tests.kernels.operator_cases import attend, random_cache

SHAPE = (9, 3, 64)


def whole_prompt(dtype: torch.dtype, kv_len: int, counts: list[int]) -> torch.Tensor:
    """Outputs of one prompt of `kv_len` tokens, computed in chunks of `counts` queries."""
    generator = torch.Generator().manual_seed(3)
    cache, page_table = random_cache(dtype, generator, [kv_len], 16, SHAPE[1:])
    q = torch.randn(kv_len, SHAPE[0], SHAPE[2], generator=generator).to(dtype)
    outs, end = [], 0
    for count in counts:
        start, end = end, end + count
        starts, lens = torch.tensor([0, count]).int(), torch.tensor([end]).int()
        outs.append(paged_attention(q[start:end], cache, page_table, starts, lens, scale=0.125))
    return torch.cat(outs)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_attention_is_pytorchs(backend: str) -> None:
    set_backend("torch" if backend == "torch" else "auto")
    generator = torch.Generator().manual_seed(0)
    cache, page_table = random_cache(torch.float32, generator, [300], 16, SHAPE[1:])
    q = torch.randn(300, SHAPE[0], SHAPE[2], generator=generator)
    out = paged_attention(q, cache, page_table, torch.tensor([0, 300]).int(), torch.tensor([300]).int(), scale=0.125)
    k, v = gather_kv_torch(cache, page_table[0, :19].long(), 300)
    heads = (x.permute(1, 0, 2)[None] for x in (q, k, v))
    expected = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True, scale=0.125)
    torch.testing.assert_close(out, expected[0].permute(1, 0, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[130, 1, 469], [1] * 20 + [580], [64] * 9 + [24]])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(counts: list[int]) -> None:
    whole = whole_prompt(torch.float32, 600, [600])
    torch.testing.assert_close(whole_prompt(torch.float32, 600, counts), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gives_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    kv_lens, counts = [700, 33, 1500, 90], [1, 20, 1, 90]
    cache, page_table = random_cache(dtype, generator, kv_lens, 16, SHAPE[1:])
    q = torch.randn(sum(counts), SHAPE[0], SHAPE[2], generator=generator).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    together = paged_attention(q, cache, page_table, starts, torch.tensor(kv_lens).int(), scale=0.125)
    for row, count in enumerate(counts):
        own = slice(int(starts[row]), int(starts[row + 1]))
        lens = torch.tensor([kv_lens[row]]).int()
        alone = paged_attention(
            q[own], cache, page_table[row : row + 1], torch.tensor([0, count]).int(), lens, scale=0.125
        )
        assert torch.equal(alone, together[own])


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    def run() -> torch.Tensor:
        return attend(torch.bfloat16, 1, kv_lens=[2000, 40, 300], counts=[1, 7, 300], page_size=16, shape=(8, 2, 64))

    alone = run()
    torch.set_num_threads(2)
    assert torch.equal(run(), alone)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_query_with_nan_spoils_no_other_row(backend: str) -> None:
    set_backend("torch" if backend == "torch" else "auto")
    generator = torch.Generator().manual_seed(6)
    cache, page_table = random_cache(torch.float32, generator, [100], 16, SHAPE[1:])
    q = torch.randn(5, SHAPE[0], SHAPE[2], generator=generator)
    q[2, 4, 7] = float("nan")
    out = paged_attention(q, cache, page_table, torch.tensor([0, 5]).int(), torch.tensor([100]).int(), scale=0.125)
    is_spoilt = out.isnan().any(dim=-1)
    assert is_spoilt.sum() == 1
    assert is_spoilt[2, 4]


@pytest.mark.parametrize("head_dim", [8, 24])
def test_head_dims_that_c_does_not_take_still_work(head_dim: int) -> None:
    out = attend(torch.float32, 2, kv_lens=[20], counts=[20], page_size=4, shape=(2, 1, head_dim))
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
