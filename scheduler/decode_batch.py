"""The decode rows of a step: every running request that may go on, with the pages that it may write."""

from typing import NamedTuple

from .req import Req
from .scheduler_state import SchedulerState


class DecodeBatch(NamedTuple):
    """`with_new_pages` are those of `reqs` whose page table grew."""

    reqs: list[Req]
    with_new_pages: list[Req]


def get_decode_batch(state: SchedulerState) -> DecodeBatch:
    """The running requests that decode in the next step, with `decode_width` slots each.

    Pages may be short while those of ending requests are not back: rows that get none sit the step out.
    """
    width, step = state.config.decode_width, state.next_step
    reqs, without_room = [], []
    for req in state.running_batch.values():
        num_left = req.num_left_to_plan
        if num_left > 0:
            kv_len = req.kv_allocated_len + width
            if kv_len > req.num_slots:
                without_room.append(req)
                continue
            req.kv_allocated_len = kv_len
            req.num_left_to_plan = num_left - 1
            req.last_step = step
            reqs.append(req)
    with_new_pages = state.pool.grow_each(without_room, width)
    for req in with_new_pages:
        req.num_left_to_plan -= 1
        req.last_step = step
    reqs += with_new_pages
    if reqs:
        state.new_token_ratio.on_decode_step()
    return DecodeBatch(reqs, with_new_pages)
