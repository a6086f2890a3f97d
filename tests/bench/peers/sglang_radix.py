"""SGLang's radix trees under the load of tests/bench/radix_load.py; runs in the environment of setup_sglang.sh.

python -m tests.bench.peers.sglang_radix     (from the repository's root; one JSON line a case)
"""

import json
from array import array

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tests.bench.radix_load import PAGE_SIZE, measure


class SGLangTree:
    """One of its trees with its page allocator, without KV tensors behind the slots."""

    def __init__(self, num_tokens: int, tree_class: type[RadixCache | UnifiedRadixCache]) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(
            num_tokens, PAGE_SIZE, torch.bfloat16, "cpu", kvcache=None, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = tree_class(params)

    def key(self, token_ids: list[int]) -> "array[int]":
        return array("q", token_ids)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None
        return slots

    def match(self, key: "array[int]") -> int:
        num_tokens: int = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(key))).device_prefix_len
        return num_tokens

    def insert(self, key: "array[int]", slots: torch.Tensor) -> int:
        num_tokens: int = self.tree.insert(InsertParams(key=RadixKey(key), value=slots)).prefix_len
        return num_tokens

    def free_duplicates(self, slots: torch.Tensor, num_present: int) -> None:
        if num_present:
            self.allocator.free(slots[:num_present])

    def evict(self, num_tokens: int) -> None:
        num_evicted = self.tree.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        assert num_evicted >= num_tokens


def main() -> None:
    """Measure the tree in Python, then the default one, whose core is the wheel's Rust extension."""
    for tree_class in (RadixCache, UnifiedRadixCache):
        core = type(getattr(SGLangTree(PAGE_SIZE, tree_class).tree, "tree_core", None)).__name__
        name = "sglang RadixCache (Python)" if tree_class is RadixCache else f"sglang UnifiedRadixCache ({core})"
        for figures in measure(name, lambda num_tokens, tree_class=tree_class: SGLangTree(num_tokens, tree_class)):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
