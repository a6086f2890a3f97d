"""What must be true of the scheduler between two events, derived anew from its parts."""

import logging
from collections import Counter
from collections.abc import Iterable

from .radix_tree import TreeNode
from .req import Req, ReqStatus
from .scheduler_state import SchedulerState

logger = logging.getLogger(__name__)


def broken_invariants(state: SchedulerState) -> list[str]:
    """One line for each thing that is wrong; an empty list if nothing is. Costs time in proportion to all pages."""
    return [*_check_pages(state), *_check_tree(state), *_check_places(state), *_check_rows(state)]


def _with_row(state: SchedulerState) -> list[Req]:
    return [req for req in state.requests.values() if not req.is_queued]


def _check_pages(state: SchedulerState) -> Iterable[str]:
    """Every page has exactly one owner: the free list, the tree, or one request."""
    pool = state.pool
    owners = Counter(pool.allocator.free_page_ids)
    for node in pool.tree_cache.nodes():
        owners.update(node.page_ids)
    for req in _with_row(state):
        owners.update(req.page_ids[req.num_tree_pages :])
    for page_id in range(pool.allocator.num_pages):
        if owners[page_id] != 1:
            yield f"page {page_id} has {owners[page_id]} owners"
    if len(owners) > pool.allocator.num_pages:
        yield "a page id is out of range"


def _check_tree(state: SchedulerState) -> Iterable[str]:
    """Locks are those of the requests with a row, sizes are the sums over the nodes, runs fit their names."""
    tree = state.pool.tree_cache
    locks: Counter[TreeNode] = Counter()
    for req in _with_row(state):
        node, path = req.last_node, list[int]()
        while node is not None and node.parent is not None:
            locks[node] += 1
            path[:0] = node.page_ids
            node = node.parent
        if path != req.page_ids[: req.num_tree_pages]:
            yield f"request {req.rid}: its page table does not begin with the pages of its tree path"
    sizes = Counter({True: 0, False: 0})
    for node in tree.nodes():
        sizes[node.lock_ref > 0] += len(node.page_ids)
        if node.lock_ref != locks[node]:
            yield f"a tree node has lock_ref {node.lock_ref}, and {locks[node]} requests use it"
        if not node.page_ids or len(node.key) != len(node.page_ids) * tree.page_size * 4:
            yield "a tree node's key and pages have different lengths"
        if node.parent is None or node.parent.children.get(node.edge) is not node:
            yield "a tree node is not its parent's child"
        if node.lock_ref == 0 and not node.children and not node.in_heap:
            yield "an evictable leaf is not in the eviction heap"
    if (sizes[False], sizes[True]) != (tree.evictable_pages, tree.protected_pages):
        yield f"tree sizes are {tree.evictable_pages} + {tree.protected_pages}, not {sizes[False]} + {sizes[True]}"


def _check_places(state: SchedulerState) -> Iterable[str]:
    """Every request is in the one place that its status says, and nowhere else."""
    places: list[tuple[str, Req]] = [("waiting", req) for req in state.waiting_queue]
    places += [("running", req) for req in state.running_batch.values()]
    places += [("ending", req) for req in state.ending.values()]
    places += [("chunked", state.chunked_req)] if state.chunked_req else []
    expected = {
        ReqStatus.WAITING: "waiting",
        ReqStatus.RETRACTED: "waiting",
        ReqStatus.PREFILLING: "chunked",
        ReqStatus.RUNNING: "running",
        ReqStatus.ENDING: "ending",
    }
    for name, req in places:
        if state.requests.get(req.rid) is not req or expected.get(req.status) != name:
            yield f"request {req.rid} is {req.status.name} and in {name}"
    if len(places) != len(state.requests):
        yield f"{len(state.requests)} requests are in {len(places)} places"
    if state.new_token_ratio.value < 0 or state.new_token_ratio.value > 1:
        yield f"new_token_ratio is {state.new_token_ratio.value}"


def _check_rows(state: SchedulerState) -> Iterable[str]:
    """Rows, steps in flight and lengths agree."""
    with_row = _with_row(state)
    rows = Counter([*state.free_rows, *(req.row for req in with_row)])
    if set(rows) != set(range(state.config.max_running_requests)) or any(count > 1 for count in rows.values()):
        yield "a row is lost, or has two owners"
    flying = Counter(req for step in state.in_flight for req in (*step.extends, *step.decodes))
    for req in with_row:
        if req.num_steps_in_flight != flying[req]:
            yield f"request {req.rid}: {req.num_steps_in_flight} steps in flight, not {flying[req]}"
        if req.status is ReqStatus.ENDING:
            continue
        page_size = state.pool.page_size
        num_slots = len(req.page_ids) * page_size
        if num_slots != req.num_slots:
            yield f"request {req.rid}: its page table holds {num_slots} tokens, not {req.num_slots}"
        if not req.num_tree_pages * page_size <= req.kv_committed_len <= req.kv_allocated_len <= num_slots:
            yield f"request {req.rid}: its cache lengths are out of order"
        if not 0 <= req.num_left_to_plan <= req.max_new_tokens - req.num_outputs:
            yield f"request {req.rid}: {req.num_left_to_plan} outputs are left to plan, of {req.max_new_tokens}"
        if req.status is ReqStatus.RUNNING and req.kv_allocated_len != _planned_len(state, req):
            yield f"request {req.rid}: {req.kv_allocated_len} slots are planned for {len(req.token_ids)} tokens"


def _planned_len(state: SchedulerState, req: Req) -> int:
    """Slots that a running request needs for its known tokens and for the steps in flight."""
    kv_len = len(req.token_ids) - 1
    for step in state.in_flight:
        samples = zip(step.extends, step.extend_samples, strict=True)
        kv_len += sum(does_sample for each, does_sample in samples if each is req)
        kv_len += sum(step.decode_width for each in step.decodes if each is req)
    return kv_len


def check_when_idle(state: SchedulerState) -> None:
    """Count, log and heal what is wrong, and never stop the server. Nothing may run or wait."""
    problems = broken_invariants(state)
    for problem in problems:
        logger.error("broken invariant: %s", problem)
    if problems:
        state.stats.num_broken_invariants += len(problems)
        state.rebuild()
