"""The paged KV cache of one layer, and its layout.

N pages, P tokens a page, G KV heads, D head dim, T tokens. Two-byte types are kept in pairs (`w` = 2, fp32 `w` = 1),
the way CPUs' dot-product instructions read them:
k_NGDPw: element (page, head, d, slot) lies at [page, head, d // w, slot, d % w], so that a row runs over tokens;
v_NGPDw: element (page, head, slot, d) lies at [page, head, slot // w, d, slot % w] (`w` = 1 where P is 1).
Nothing outside `kernels/` may rely on this.
"""

import contextlib
import dataclasses
import math
import mmap

import torch


@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_pages(self) -> int:
        """Pages that the cache holds."""
        return self.k.shape[0]


def alloc_kv_cache(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> KVCache:
    """A zeroed cache of `num_pages` pages. ValueError: a page size that is no power of two, an odd head dim."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, not {page_size}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    width = 2 if dtype.itemsize == 2 else 1
    v_width = min(width, page_size)
    k_shape = (num_pages, num_kv_heads, head_dim // width, page_size, width)
    v_shape = (num_pages, num_kv_heads, page_size // v_width, head_dim, v_width)
    k, v = (_zeros(shape, dtype, torch.device(device)) for shape in (k_shape, v_shape))
    return KVCache(k, v, page_size, num_kv_heads, head_dim)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on CPU the kernel's own zero pages, which cost nothing until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def page_bytes(page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page of one layer, keys and values."""
    return 2 * page_size * num_kv_heads * head_dim * dtype.itemsize


def write_kv(
    cache: KVCache, k_TGD: torch.Tensor, v_TGD: torch.Tensor, page_T: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """Write one key and value per token to (page, slot)."""
    width, v_width = cache.k.shape[-1], cache.v.shape[-1]
    cache.k[page_T, :, :, slot_T, :] = k_TGD.reshape(*k_TGD.shape[:2], cache.head_dim // width, width)
    cache.v[page_T, :, slot_T // v_width, :, slot_T % v_width] = v_TGD


def gather_kv(cache: KVCache, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values (each [length, G, D]) of a sequence that lies on `pages`."""
    shape = (-1, cache.num_kv_heads, cache.head_dim)
    k = cache.k[pages].permute(0, 3, 1, 2, 4).reshape(shape)
    v = cache.v[pages].permute(0, 2, 4, 1, 3).reshape(shape)
    return k[:length], v[:length]
