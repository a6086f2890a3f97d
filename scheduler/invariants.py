"""What must be true of the scheduler between two events, derived anew from its parts; and what is done where it is not."""

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from .radix_tree import TreeNode
from .req_invariants import check_families, check_places, check_queue, check_reqs, check_rows, check_steps, with_row
from .scheduler_state import SchedulerState

MAX_PROBLEMS = 100  # that are told at once

logger = logging.getLogger(__name__)


def broken_invariants(state: SchedulerState) -> list[str]:
    """One line for each thing that is wrong, up to MAX_PROBLEMS; an empty list if nothing is.

    Costs time in proportion to pages and tree nodes: some 40 ms for 62,500 nodes of a page each.
    """
    nodes = list(islice(state.pool.tree_cache.nodes(), state.config.num_pages + 1))
    problems = chain(
        _check_pages(state, nodes),
        _check_tree(state, nodes),
        check_places(state),
        check_families(state),
        check_queue(state),
        check_rows(state),
        check_steps(state),
        check_reqs(state),
        _check_bounds(state),
    )
    return list(islice(problems, MAX_PROBLEMS))


def check_when_idle(state: SchedulerState) -> None:
    """Count, log and heal what is wrong; never raises. Nothing may run or wait."""
    try:
        problems = broken_invariants(state)
    except Exception:
        logger.exception("the invariants could not be checked")
        problems = ["the check itself failed"]
    for problem in problems:
        logger.error("broken invariant: %s", problem)
    if problems:
        state.stats.num_broken_invariants += len(problems)
        state.rebuild()


def _check_pages(state: SchedulerState, nodes: list[TreeNode]) -> Iterator[str]:
    """Every page has exactly one owner: the free list, the tree, or one request."""
    allocator = state.pool.allocator
    num_pages = allocator.num_pages
    if allocator.num_double_frees:
        yield f"pages were freed twice, {allocator.num_double_frees} times"
    owned = allocator.free_page_ids
    for node in nodes:
        owned += node.page_ids
    for req in with_row(state):
        owned += req.page_ids[req.num_tree_pages :]
    distinct = set(owned)
    if len(owned) == len(distinct) == num_pages and min(owned) == 0 and max(owned) == num_pages - 1:
        return
    owners = Counter(owned)
    for page_id in range(num_pages):
        if owners[page_id] != 1:
            yield f"page {page_id} has {owners[page_id]} owners"
    yield from (f"page {page_id} does not exist" for page_id in distinct - set(range(num_pages)))


def _check_tree(state: SchedulerState, nodes: list[TreeNode]) -> Iterator[str]:
    """Locks are those of the requests with a row, sizes are the sums over the nodes, runs fit their names."""
    tree = state.pool.tree_cache
    locks: Counter[TreeNode] = Counter()
    yield from _check_paths(state, locks)
    page_bytes = tree.page_bytes
    evictable_pages = protected_pages = 0
    for node in nodes:
        num_pages, lock_ref = len(node.page_ids), node.lock_ref
        if lock_ref:
            protected_pages += num_pages
        else:
            evictable_pages += num_pages
            if not node.children and node.heap_key is None:
                yield "an evictable leaf is not in the eviction heap"
        if lock_ref != locks.get(node, 0):
            yield f"a tree node has lock_ref {lock_ref}, and {locks.get(node, 0)} requests use it"
        if num_pages == 0 or len(node.key) != num_pages * page_bytes:
            yield "a tree node's key and pages have different lengths"
    yield from _check_links(tree.root, nodes)
    if (evictable_pages, protected_pages) != (tree.evictable_pages, tree.protected_pages):
        told = f"{tree.evictable_pages} + {tree.protected_pages}"
        yield f"tree sizes are {told} pages, not {evictable_pages} + {protected_pages}"
    num_watched = len(state.waiting_queue) if tree.listener is not None else 0
    if tree.root.num_waiting != num_watched:
        yield f"{tree.root.num_waiting} requests wait at tree nodes, not {num_watched}"


def _check_paths(state: SchedulerState, locks: "Counter[TreeNode]") -> Iterator[str]:
    """A page table begins with the pages of its path in the tree, which the request locks: counted into `locks`."""
    for req in with_row(state):
        node, path = req.last_node, list[int]()
        while node is not None and node.parent is not None:
            locks[node] += 1
            path[:0] = node.page_ids
            node = node.parent
        if path != req.page_ids[: req.num_tree_pages]:
            yield f"request {req.rid}: its page table does not begin with the pages of its tree path"


def _check_links(root: TreeNode, nodes: list[TreeNode]) -> Iterator[str]:
    """Every child knows its parent and its name there."""
    for node in chain((root,), nodes):
        for edge, child in node.children.items():
            if child.parent is not node or (child.edge is not edge and child.edge != edge):
                yield "a tree node is not its parent's child"


def _check_bounds(state: SchedulerState) -> Iterator[str]:
    """What must stay small, and what must not be negative."""
    if not 0 <= state.new_token_ratio.value <= 1:
        yield f"new_token_ratio is {state.new_token_ratio.value}"
    if len(state.journal) > len(state.requests) + state.journal.max_requests:
        yield f"the journal holds {len(state.journal)} stories"
    pool = state.pool
    if not 0 <= pool.num_available_pages <= state.config.num_pages:
        yield f"{pool.num_available_pages} of {state.config.num_pages} pages are available"
