"""What a radix cache is measured with: the same operations on the same keys, whoever's tree it is.

Needs nothing but Python: peers run it in interpreters of their own.
"""

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Protocol

PAGE_SIZE = 16
MATCH_TOKENS = 4096
CHAIN_NODES = 8
HEAD_TOKENS = 128  # of an inserted prompt of PROMPT_TOKENS; shared by a NUM_HEADS-th of them
PROMPT_TOKENS = 512
NUM_HEADS = 4
CACHED_TOKENS = (10_000, 1_000_000)
NUM_OPERATIONS = 400
VOCAB_SIZE = 50_000

Figures = dict[str, Any]


class Tree(Protocol):
    """A radix cache with its allocator. `slots` is what it keeps for tokens; making them is not timed."""

    def key(self, token_ids: list[int]) -> "array[int]":
        """The tokens as a request holds them."""
        ...

    def alloc(self, num_tokens: int) -> Any:
        """Slots for so many tokens."""
        ...

    def match(self, key: "array[int]") -> int:
        """Tokens of the longest cached prefix."""
        ...

    def insert(self, key: "array[int]", slots: Any) -> int:
        """Cache the run; returns how many of its tokens were there."""
        ...

    def free_duplicates(self, slots: Any, num_present: int) -> None:
        """The first slots were not taken by the tree."""
        ...

    def evict(self, num_tokens: int) -> None:
        """Free so many tokens."""
        ...


def measure(name: str, make_tree: Callable[[int], Tree]) -> Iterator[Figures]:
    """One line a case; `make_tree` gets the tokens that the tree must have room for."""
    for num_nodes in (1, CHAIN_NODES):
        yield {"tree": name, "case": "match", "tokens": MATCH_TOKENS, "nodes": num_nodes} | _match(make_tree, num_nodes)
    medians: dict[str, list[float]] = {}
    for num_cached in CACHED_TOKENS:
        for case, seconds in _insert_and_evict(make_tree(num_cached + 4 * PROMPT_TOKENS), num_cached).items():
            yield {"tree": name, "case": case, "cached_tokens": num_cached} | _figures(seconds)
            medians.setdefault(case, []).append(statistics.median(seconds))
    for case, (small, large) in medians.items():
        yield {"tree": name, "case": case, "ratio": round(large / small, 2)}


def _match(make_tree: Callable[[int], Tree], num_nodes: int) -> Figures:
    """A prefix that is one node, or a chain of them."""
    tree = make_tree(2 * MATCH_TOKENS)
    token_ids = random.Random(1).choices(range(VOCAB_SIZE), k=MATCH_TOKENS)
    for node in range(1, num_nodes + 1):
        num_tokens = MATCH_TOKENS * node // num_nodes
        slots = tree.alloc(num_tokens)
        tree.free_duplicates(slots, tree.insert(tree.key(token_ids[:num_tokens]), slots))
    key = tree.key(token_ids)
    assert tree.match(key) == MATCH_TOKENS
    return _figures([_seconds(lambda: tree.match(key)) for _ in range(5 * NUM_OPERATIONS)])


def _insert_and_evict(tree: Tree, num_cached: int) -> dict[str, list[float]]:
    """Insert a prompt and evict as much, so that the tree keeps its size; the least recent go (lru)."""
    rng = random.Random(2)
    heads = [rng.choices(range(VOCAB_SIZE), k=HEAD_TOKENS) for _ in range(NUM_HEADS)]
    times: dict[str, list[float]] = {"insert": [], "evict": []}
    num_new = PROMPT_TOKENS - HEAD_TOKENS
    for number in range(num_cached // num_new + NUM_OPERATIONS):
        tail = rng.choices(range(VOCAB_SIZE), k=num_new)
        key, slots = tree.key(heads[number % NUM_HEADS] + tail), tree.alloc(PROMPT_TOKENS)
        start = time.perf_counter()
        num_present = tree.insert(key, slots)
        times["insert"].append(time.perf_counter() - start)
        assert num_present == (HEAD_TOKENS if number >= NUM_HEADS else 0)
        tree.free_duplicates(slots, num_present)
        if number >= num_cached // num_new:
            times["evict"].append(_seconds(lambda: tree.evict(num_new)))
    return {case: seconds[-NUM_OPERATIONS:] for case, seconds in times.items()}


def _seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def _figures(seconds: list[float]) -> Figures:
    return {
        "median_us": round(statistics.median(seconds) * 1e6, 2),
        "p99_us": round(statistics.quantiles(seconds, n=100)[98] * 1e6, 2),
    }
