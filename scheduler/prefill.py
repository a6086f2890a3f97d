"""The prefill rows of a step: the chunked request goes on first, then waiting ones within the budgets."""

from itertools import chain

from .prefill_adder import AddReqResult, PrefillAdder
from .prefix_sharing import find_prefix_to_wait_for, still_waits
from .req import Req
from .scheduler_state import SchedulerState


def get_new_batch_prefill(state: SchedulerState, num_decodes: int) -> list[Req]:
    """Admit what fits and start it; returns the prefill rows of this step."""
    if state.chunked_req is None and not (state.waiting_queue and state.free_rows):
        return []
    adder = _prefill_adder(state, num_decodes)
    verdict = adder.budget_state() if state.chunked_req is None else adder.add_chunked_req(state.chunked_req)
    for req in state.waiting_queue.candidates(state.next_step, state.running_batch.values()):
        if verdict is not AddReqResult.CONTINUE:
            break
        if not _waits_for_prefix(state, req, adder):
            verdict = adder.add_one_req(req)
    for req in adder.can_run_list:
        state.start_running(req)
    return adder.can_run_list


def _prefill_adder(state: SchedulerState, num_decodes: int) -> PrefillAdder:
    config = state.config
    chunk = config.chunked_prefill_size
    return PrefillAdder(
        state.pool,
        state.running_batch.values(),
        state.new_token_ratio.value,
        rem_input_tokens=config.max_prefill_tokens,
        rem_chunk_tokens=chunk if chunk > 0 else None,
        num_mixed_decode_tokens=num_decodes,
        prefill_max_requests=len(state.free_rows) + (state.chunked_req is not None),
    )


def _waits_for_prefix(state: SchedulerState, req: Req, adder: PrefillAdder) -> bool:
    """Whether another request is computing a prefix of this one; looks this one up in the tree if not."""
    if still_waits(req, state.pool.page_size):
        return True
    state.pool.init_next_round_input(req)
    if state.config.disable_radix_cache:
        return False
    prefilling = chain(state.prefilling.values(), adder.can_run_list)
    req.waits_for = find_prefix_to_wait_for(req, prefilling, state.pool.page_size)
    return req.waits_for is not None
