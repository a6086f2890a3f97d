"""The calls that kernels.py times: every operator of the catalogue in SmolLM2-135M's shapes.

    @bench("rms_norm")
    def rms_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
        yield Case("32", [Call(x, weight, 1e-5)], num_bytes=...)

Operands that stream from memory in a real step (weights, keys and values) come in as many copies as the caches can not
hold, one call after another; activations are hot, as they are there. FLOPs and bytes are what the floor is made of.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from millstream.kernels.kv_cache import KVCache, alloc_kv_cache

STREAMED_BYTES = 2**27
HIDDEN, INNER, VOCAB = 576, 1536, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
NUM_TOKENS = (1, 32, 512)
ATTENTION_FLOPS = 4 * NUM_HEADS * HEAD_DIM  # of a query and a key


class Call:
    """Operands."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args
        self.kwargs = kwargs


@dataclass(frozen=True)
class Case:
    """Calls of one size. `calls_of` has those of versions that keep their operands in another form."""

    name: str
    calls: Sequence[Call]
    flops: float = 0.0
    num_bytes: float = 0.0
    is_int8: bool = False
    calls_of: dict[str, Sequence[Call]] = field(default_factory=dict)


MakeCases = Callable[[torch.dtype], Iterator[Case]]
CASES: dict[str, MakeCases] = {}


def bench(operator: str) -> Callable[[MakeCases], MakeCases]:
    """Register the decorated function as the cases of an operator."""

    def register(make: MakeCases) -> MakeCases:
        assert operator not in CASES, f"two sets of cases for {operator}"
        CASES[operator] = make
        return make

    return register


def num_copies(num_bytes: float) -> int:
    """So many operands of this size do not fit into the caches."""
    return max(1, math.ceil(STREAMED_BYTES / num_bytes))


def filled_cache(dtype: torch.dtype, num_requests: int, kv_len: int) -> tuple[KVCache, torch.Tensor]:
    """A cache of random values and a page table of shuffled pages."""
    pages_each = -(-kv_len // PAGE_SIZE)
    cache = alloc_kv_cache(num_requests * pages_each, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype, "cpu")
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    return cache, torch.randperm(num_requests * pages_each).to(torch.int32).view(num_requests, pages_each)


@bench("rms_norm")
def rms_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    weight = torch.ones(HIDDEN, dtype=dtype)
    for count in NUM_TOKENS:
        x = torch.randn(count, HIDDEN).to(dtype)
        yield Case(f"{count} tokens", [Call(x, weight, 1e-5)], num_bytes=2 * x.nbytes)


@bench("add_rms_norm")
def add_rms_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    weight = torch.ones(HIDDEN, dtype=dtype)
    for count in NUM_TOKENS:
        x, residual = torch.randn(count, HIDDEN).to(dtype), torch.zeros(count, HIDDEN, dtype=dtype)
        yield Case(f"{count} tokens", [Call(x, residual, weight, 1e-5)], num_bytes=4 * x.nbytes)


@bench("silu_and_mul")
@bench("gelu_tanh_and_mul")
def gated_cases(dtype: torch.dtype) -> Iterator[Case]:
    for count in NUM_TOKENS:
        x = torch.randn(count, 2 * INNER).to(dtype)
        yield Case(f"{count} tokens", [Call(x)], num_bytes=1.5 * x.nbytes)


@bench("embed")
def embed_cases(dtype: torch.dtype) -> Iterator[Case]:
    table = torch.randn(VOCAB, HIDDEN).to(dtype)
    for count in NUM_TOKENS:
        calls = [Call(torch.randint(0, VOCAB, (count,)), table, 0, 1.0) for _ in range(32)]
        yield Case(f"{count} tokens", calls, num_bytes=2 * count * HIDDEN * dtype.itemsize)


@bench("select_rows")
def select_rows_cases(dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(512, HIDDEN).to(dtype)
    for count in (1, 32):
        call = Call(x, torch.randint(0, 512, (count,)))
        yield Case(f"{count} of 512 tokens", [call], num_bytes=2 * count * HIDDEN * dtype.itemsize)


@bench("rotary_tables")
def rotary_tables_cases(dtype: torch.dtype) -> Iterator[Case]:
    for count in NUM_TOKENS:
        call = Call(torch.arange(count, dtype=torch.int32), torch.rand(HEAD_DIM // 2), 1.0)
        yield Case(f"{count} tokens", [call], num_bytes=4 * count * HEAD_DIM)


@bench("rotary_and_store")
def rotary_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The tokens of one request, as views of a fused projection."""
    for count in NUM_TOKENS:
        cache, page_table = filled_cache(dtype, 1, count)
        qkv = torch.randn(count, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
        cos, sin = torch.ones(count, HEAD_DIM // 2), torch.zeros(count, HEAD_DIM // 2)
        rows, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
        call = Call(
            *qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1), cos, sin, cache, page_table, rows, positions
        )
        yield Case(f"{count} tokens", [call], num_bytes=2 * qkv.nbytes + cos.nbytes + sin.nbytes)


@bench("decode_attention")
def decode_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Requests of one length on shuffled pages."""
    for num_requests, kv_len in ((1, 320), (8, 320), (32, 320), (1, 4096), (64, 512)):
        num_keys = num_requests * kv_len
        kv_bytes = 2 * num_keys * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
        q = torch.randn(num_requests, NUM_HEADS, HEAD_DIM).to(dtype)
        kv_lens = torch.full((num_requests,), kv_len, dtype=torch.int32)
        caches = [filled_cache(dtype, num_requests, kv_len) for _ in range(num_copies(kv_bytes))]
        calls = [Call(q, cache, page_table, kv_lens, scale=0.125) for cache, page_table in caches]
        name = f"{num_requests} requests of {kv_len}"
        yield Case(name, calls, flops=num_keys * ATTENTION_FLOPS, num_bytes=kv_bytes + 2 * q.nbytes)


@bench("extend_attention")
def extend_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Prefill chunks, and the verification of 4 tokens each of 16 requests."""
    for num_requests, num_queries, cached in ((1, 256, 0), (4, 256, 0), (1, 512, 2048), (16, 4, 508)):
        kv_len = cached + num_queries
        cache, page_table = filled_cache(dtype, num_requests, kv_len)
        q = torch.randn(num_requests * num_queries, NUM_HEADS, HEAD_DIM).to(dtype)
        starts = torch.arange(num_requests + 1, dtype=torch.int32) * num_queries
        kv_lens = torch.full((num_requests,), kv_len, dtype=torch.int32)
        num_pairs = num_requests * (num_queries * cached + num_queries * (num_queries + 1) // 2)
        kv_bytes = 2 * num_requests * kv_len * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
        call = Call(q, cache, page_table, starts, kv_lens, scale=0.125)
        name = f"{num_requests} x {num_queries} on {cached}"
        yield Case(name, [call], flops=num_pairs * ATTENTION_FLOPS, num_bytes=kv_bytes + 2 * q.nbytes)
