"""Priority scheduling: running requests that are much less urgent than the first waiting one make room for it.

The first one is the first candidate, ageing included: only it takes the place that becomes free, so preempting for
another would be in vain. For the same reason one that had aged when it was admitted is no victim (it would come first
again), nor is one that was retracted or preempted MAX_RETRACTIONS times. A victim computes its KV again, apart from what
the radix cache still holds then; so no more of them go than the first one needs.
"""

from .memory_forecast import num_freed_pages
from .prefill import make_prefill_adder
from .prefill_adder import CLIP_MAX_NEW_TOKENS
from .prefix_sharing import PrefixesOnTheWay, waits_for_prefix
from .radix_tree import TreeNode
from .req import Req
from .retraction import MAX_RETRACTIONS
from .scheduler_state import SchedulerState


def victims_to_preempt(state: SchedulerState) -> list[Req]:
    """Whom to retract so that the first candidate fits; none where it fits already, or would not fit even so."""
    head = _urgent_head(state)
    if head is None:
        return []
    candidates = _candidates(state, head)
    if not candidates or _waits_for_prefix(state, head):
        return []
    needs_row = not state.free_rows and not state.ending
    need = _Need(state, head)
    if not needs_row and need.tokens <= 0:
        return []
    victims: list[Req] = []
    for req in candidates:
        victims.append(req)
        if need.is_covered_by(victims):
            return _without_spare_ones(victims, need, needs_row=needs_row)
    return []


def preempt(state: SchedulerState, victims: list[Req]) -> None:
    """Let the victims wait again; nothing may be in flight."""
    head = next(state.waiting_queue.candidates(state.next_step, state.running_batch.values()))
    for req in victims:
        state.retract(req, "preempted", by=head.rid, priority=req.priority, by_priority=head.priority)
        state.stats.num_preemptions += 1


def _urgent_head(state: SchedulerState) -> Req | None:
    """The first candidate, if it is urgent enough to preempt anyone who was ever here: the cheap test."""
    config, queue = state.config, state.waiting_queue
    if not config.enable_priority_scheduling or not queue:
        return None
    head = next(queue.candidates(state.next_step, state.running_batch.values()))
    least = queue.lowest_priority
    is_urgent = least is not None and head.priority - least > config.priority_scheduling_preemption_threshold
    return head if is_urgent else None


def _candidates(state: SchedulerState, head: Req) -> list[Req]:
    """Those that the head may preempt: the least important first, of these the newest first."""
    limit = head.priority - state.config.priority_scheduling_preemption_threshold
    running = [*state.running_batch.values(), *([state.chunked_req] if state.chunked_req else [])]
    candidates = [
        req
        for req in running
        if req.priority < limit and req.num_retractions < MAX_RETRACTIONS and not state.waiting_queue.had_aged(req)
    ]
    return sorted(candidates, key=lambda req: (req.priority, -req.arrival))


def _waits_for_prefix(state: SchedulerState, head: Req) -> bool:
    """Whether the head would not start now in any case; it is looked up in the tree if not."""
    return waits_for_prefix(head, state.pool, PrefixesOnTheWay(state.pool.page_size, state.prefilling.values()))


def _without_spare_ones(victims: list[Req], need: "_Need", *, needs_row: bool) -> list[Req]:
    """Let those go on that are not needed after all, the most important first: a small victim before a big one."""
    for req in reversed(victims[:-1]):
        others = [other for other in victims if other is not req]
        if need.is_covered_by(others) and (others or not needs_row):
            victims = others
    return victims


class _Need:
    """What the head lacks by the estimates of the step to come, in tokens; not positive where it fits."""

    def __init__(self, state: SchedulerState, head: Req) -> None:
        self._state = state
        self._ratio = state.new_token_ratio.value
        decode_tokens = _num_decode_pages(state) * state.pool.page_size
        self.tokens = make_prefill_adder(state, 0).lacking_tokens(head, decode_tokens)

    def is_covered_by(self, victims: list[Req]) -> bool:
        """Whether what they hold and what is reserved for them is enough; it is, when nobody else runs."""
        if len(victims) == self._state.num_running_reqs:
            return True
        locks_left: dict[TreeNode, int] = {}
        num_pages = sum(num_freed_pages(req, locks_left) for req in victims)
        reserved = sum(map(self._reserve, victims))
        return num_pages * self._state.pool.page_size + reserved >= self.tokens

    def _reserve(self, req: Req) -> float:
        if req is self._state.chunked_req:
            return 0.0  # what is computed in part reserves nothing
        num_left = min(req.num_left_to_plan, CLIP_MAX_NEW_TOKENS)
        return num_left if req.ignore_eos else num_left * self._ratio


def _num_decode_pages(state: SchedulerState) -> int:
    """Pages that the decodes of the step to come take before the head is tried."""
    width, num_pages_for = state.config.decode_width, state.pool.num_pages_for
    return sum(
        num_pages_for(req.kv_allocated_len + width) - len(req.page_ids)
        for req in state.running_batch.values()
        if req.kv_allocated_len + width > req.num_slots and req.num_left_to_plan > 0
    )
