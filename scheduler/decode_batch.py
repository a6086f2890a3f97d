"""The decode rows of a step: every running request that may go on, with the pages that it may write."""

from typing import NamedTuple

from .req import Req
from .scheduler_state import SchedulerState


class DecodeBatch(NamedTuple):
    """`with_new_pages` are those of `reqs` whose page table grew."""

    reqs: list[Req]
    with_new_pages: list[Req]


def get_decode_batch(state: SchedulerState) -> DecodeBatch:
    """The running requests that decode in this step, with `decode_width` slots each.

    Pages may be short while those of ending requests are not back: rows that get none sit the step out.
    """
    width, grow = state.config.decode_width, state.pool.grow
    reqs, with_new_pages = [], []
    for req in state.running_batch.values():
        if req.num_left_to_plan > 0:
            kv_len = req.kv_allocated_len + width
            if kv_len <= req.num_slots:
                req.kv_allocated_len = kv_len
            elif grow(req, kv_len):
                with_new_pages.append(req)
            else:
                continue
            reqs.append(req)
    if reqs:
        state.new_token_ratio.on_decode_step()
    return DecodeBatch(reqs, with_new_pages)
