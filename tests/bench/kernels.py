"""Times of every operator, C version beside torch reference: one JSON line each.

Run the file with the package installed (or PYTHONPATH=.pkg). Options: --threads N, --only PREFIX, --rounds N. Times are
microseconds: the median and the best of the rounds; both versions run in turn within each round, so that the machine's
noise meets both. On a busy machine compare the best times with --threads 1: threads wait for each other.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from millstream.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from millstream.kernels.attention import paged_attention
from millstream.kernels.backend import configure, set_backend
from millstream.kernels.kv_cache import KVCache, alloc_kv_cache
from millstream.kernels.linear import PackedLinear
from millstream.kernels.rms_norm import add_rms_norm, rms_norm
from millstream.kernels.rotary import rotary_and_store
from millstream.kernels.sampling import SamplingTensors, sample

PAGE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 9, 3, 64
Case = tuple[str, Callable[[], object]]


def main() -> None:
    """Run the chosen cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        configure("auto", Path(directory))
        for name, call in cases():
            if name.startswith(options.only):
                print(json.dumps({"operator": name, "threads": options.threads, **measure(call, options.rounds)}))


def measure(call: Callable[[], object], num_rounds: int) -> dict[str, float]:
    """Microseconds of both versions."""
    times: dict[str, list[float]] = {"auto": [], "torch": []}
    for _ in range(num_rounds):
        for backend, results in times.items():
            set_backend("auto" if backend == "auto" else "torch")
            call()
            start = time.perf_counter()
            count = 0
            while count < 1 or time.perf_counter() - start < 0.02:
                call()
                count += 1
            results.append((time.perf_counter() - start) / count)
    set_backend("auto")
    auto, reference = (statistics.median(results) * 1e6 for results in times.values())
    best_auto, best_reference = (min(results) * 1e6 for results in times.values())
    figures = {"c_us": auto, "torch_us": reference, "c_best_us": best_auto, "torch_best_us": best_reference}
    return {name: round(value, 1) for name, value in figures.items()}


def cases() -> Iterator[Case]:
    """Every operator in the shapes of SmolLM2-135M."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from attention_cases(dtype)
        yield from elementwise_cases(dtype)
    yield from linear_cases()
    yield from sampling_cases()


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Decode of a batch, and prefill chunks of 512 queries."""
    for name, num_requests, num_queries, cached in (
        ("decode-b1-c512", 1, 1, 511),
        ("decode-b1-c4096", 1, 1, 4095),
        ("decode-b16-c512", 16, 1, 511),
        ("decode-b64-c512", 64, 1, 511),
        ("extend-512-on-0", 1, 512, 0),
        ("extend-512-on-2048", 1, 512, 2048),
    ):
        yield f"attention-{name}-{dtype}", attention_case(dtype, num_requests, num_queries, cached)


def attention_case(dtype: torch.dtype, num_requests: int, num_queries: int, cached: int) -> Callable[[], object]:
    """Requests of one length on shuffled pages."""
    kv_len = cached + num_queries
    cache, page_table = filled_cache(dtype, num_requests, kv_len)
    q = torch.randn(num_requests * num_queries, NUM_HEADS, HEAD_DIM).to(dtype)
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * num_queries
    kv_lens = torch.full((num_requests,), kv_len, dtype=torch.int32)
    return lambda: paged_attention(q, cache, page_table, starts, kv_lens, scale=0.125)


def filled_cache(dtype: torch.dtype, num_requests: int, kv_len: int) -> tuple[KVCache, torch.Tensor]:
    """A cache of random values and a page table of shuffled pages."""
    pages_each = -(-kv_len // PAGE_SIZE)
    cache = alloc_kv_cache(num_requests * pages_each, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype, "cpu")
    cache.k.copy_(torch.randn(cache.k.shape))
    cache.v.copy_(torch.randn(cache.v.shape))
    return cache, torch.randperm(num_requests * pages_each).to(torch.int32).view(num_requests, pages_each)


def elementwise_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Norms, activations and rotary for a decode step and a prefill chunk."""
    for num_tokens in (1, 16, 512):
        x, residual = torch.randn(num_tokens, 576).to(dtype), torch.zeros(num_tokens, 576, dtype=dtype)
        weight, gates = torch.ones(576, dtype=dtype), torch.randn(num_tokens, 3072).to(dtype)
        suffix = f"{num_tokens}-{dtype}"
        yield f"rms_norm-{suffix}", lambda x=x, w=weight: rms_norm(x, w, 1e-5)
        yield f"add_rms_norm-{suffix}", lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-5)
        yield f"silu_and_mul-{suffix}", lambda x=gates: silu_and_mul(x)
        yield f"gelu_tanh_and_mul-{suffix}", lambda x=gates: gelu_tanh_and_mul(x)
        yield f"rotary_and_store-{suffix}", rotary_case(dtype, num_tokens)


def rotary_case(dtype: torch.dtype, num_tokens: int) -> Callable[[], object]:
    """One token each of many requests (or all of one), as views of a fused projection."""
    cache, page_table = filled_cache(dtype, 1, num_tokens)
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    cos, sin = torch.ones(num_tokens, HEAD_DIM), torch.zeros(num_tokens, HEAD_DIM)
    rows, positions = torch.zeros(num_tokens, dtype=torch.int32), torch.arange(num_tokens, dtype=torch.int32)
    return lambda: rotary_and_store(q, k, v, cos, sin, cache, page_table, rows, positions)


def linear_cases() -> Iterator[Case]:
    """Packed bf16 products; the reference column is the same call, for there is one version."""
    for n, k in ((3072, 576), (576, 1536), (960, 576), (49152, 576)):
        linear = PackedLinear(torch.randn(n, k).to(torch.bfloat16))
        for m in (1, 8, 32, 128):
            x = torch.randn(m, k).to(torch.bfloat16)
            yield f"linear-{n}x{k}-{m}", lambda linear=linear, x=x: linear(x)


def sampling_cases() -> Iterator[Case]:
    """32 rows over 49,152 tokens with the filters in turn."""
    num_rows = 32
    logits = torch.randn(num_rows, 49152) * 3
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature", 1.0, 0, 1.0, 0.0),
        ("top_k-50", 1.0, 50, 1.0, 0.0),
        ("top_p-0.9", 0.7, 0, 0.9, 0.0),
        ("min_p-0.05", 1.0, 0, 1.0, 0.05),
    ):
        params = SamplingTensors(
            torch.full((num_rows,), temperature),
            torch.full((num_rows,), top_k),
            torch.full((num_rows,), top_p),
            torch.full((num_rows,), min_p),
            torch.arange(num_rows),
        )
        yield f"sample-{name}", lambda p=params: sample(logits, p, torch.arange(num_rows))


if __name__ == "__main__":
    main()
