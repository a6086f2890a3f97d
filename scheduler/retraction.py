"""Memory under pressure: when the running requests lack pages, some give theirs up and wait again."""

import logging

from .output import OUT_OF_MEMORY, abort_reason
from .req import Req
from .scheduler_state import SchedulerState

MAX_RETRACTIONS = 3  # a request that was retracted so often goes last

logger = logging.getLogger(__name__)


def retract_decode(state: SchedulerState) -> None:
    """Give up requests until the others can decode. The last one is never given up: it ends if it can't go on."""
    candidates = [*state.running_batch.values(), *([state.chunked_req] if state.chunked_req else [])]
    candidates = retraction_order(candidates)
    num_candidates = len(candidates)
    while len(candidates) > 1 and (num_missing := state.num_missing_pages()) > 0:
        state.retract(candidates.pop(0), "retracted", reason="kv_cache", missing_pages=num_missing)
        state.stats.num_retractions += 1
    state.new_token_ratio.on_retract(candidates)
    logger.warning(
        "KV cache is full: retracted %d of %d requests; new_token_ratio is %.3f now",
        num_candidates - len(candidates),
        num_candidates,
        state.new_token_ratio.value,
    )
    if state.num_missing_pages() > 0:
        _end_the_last(state, candidates[0])


def retraction_order(reqs: list[Req]) -> list[Req]:
    """Who is retracted first, next, ...: shortest output first, then longest input; often retracted ones last."""
    return sorted(
        reqs, key=lambda req: (req.num_retractions >= MAX_RETRACTIONS, req.num_outputs, -req.prompt_len, -req.arrival)
    )


def _end_the_last(state: SchedulerState, req: Req) -> None:
    num_tokens, num_slots = len(req.token_ids), state.pool.max_total_num_tokens
    text = f"Out of KV cache: the request has {num_tokens} tokens, and all other requests were retracted already"
    state.end(req, abort_reason(f"{text}; the cache holds {num_slots} tokens.", 500, OUT_OF_MEMORY))
