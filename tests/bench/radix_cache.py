"""The radix cache: match, insert and evict, one JSON line a case; SGLang's two trees beside it where they are installed.

    tests/bench/peers/setup_sglang.sh
    python -m tests.bench.radix_cache [--sglang-python PATH]

SGLang's RadixCache (Python) and its default UnifiedRadixCache (Rust core) get the same keys in their own interpreter.
Every operation starts from the tokens as a request holds them, and an eviction ends with the pages in the free list.
"""

import argparse
import json
import os
import subprocess
from array import array
from pathlib import Path

from millstream.scheduler.page_pool import PagePool
from tests.bench.radix_load import PAGE_SIZE, measure

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "millstream-peers"))
NAMESPACE = (None, None)


class OurTree:
    """RadixCache and PageAllocator as PagePool uses them."""

    def __init__(self, num_tokens: int) -> None:
        self.pool = PagePool(num_tokens // PAGE_SIZE, PAGE_SIZE)
        self.tree = self.pool.tree_cache

    def key(self, token_ids: list[int]) -> "array[int]":
        return array("i", token_ids)

    def alloc(self, num_tokens: int) -> list[int]:
        page_ids = self.pool.alloc(num_tokens // PAGE_SIZE)
        assert page_ids is not None
        return page_ids

    def match(self, key: "array[int]") -> int:
        return len(self.tree.match_prefix(NAMESPACE, key.tobytes()).page_ids) * PAGE_SIZE

    def insert(self, key: "array[int]", slots: list[int]) -> int:
        return self.tree.insert(self.tree.root, NAMESPACE, key.tobytes(), slots).num_present_pages * PAGE_SIZE

    def free_duplicates(self, slots: list[int], num_present: int) -> None:
        self.pool.allocator.free(slots[: num_present // PAGE_SIZE])

    def evict(self, num_tokens: int) -> None:
        self.pool.allocator.free(self.tree.evict(num_tokens // PAGE_SIZE))


def main() -> None:
    """Measure ours, then SGLang's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang-python", type=Path, default=PEERS / "sglang" / "bin" / "python")
    args = parser.parse_args()
    for figures in measure("millstream", OurTree):
        print(json.dumps(figures), flush=True)
    if not args.sglang_python.exists():
        print(json.dumps({"tree": "sglang", "skipped": f"no {args.sglang_python} (tests/bench/peers/setup_sglang.sh)"}))
        return
    command = [args.sglang_python, "-W", "ignore", "-m", "tests.bench.peers.sglang_radix"]
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
