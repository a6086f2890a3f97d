"""The order in which waiting requests are considered."""

import bisect

from .req import Req


def enqueue(waiting_queue: list[Req], req: Req) -> None:
    """Put a request in its place in an fcfs queue: by arrival, so a retracted one is ahead of those that came later."""
    insort = bisect.insort_left if req.num_retractions else bisect.insort_right
    insort(waiting_queue, req, key=_arrival)


def _arrival(req: Req) -> float:
    return req.message.arrival


def retraction_order(reqs: list[Req], max_retractions: int) -> list[Req]:
    """Who is retracted first, next, ...: shortest output first, then longest input; often retracted ones last."""
    return sorted(
        reqs, key=lambda req: (req.num_retractions >= max_retractions, req.num_outputs, -req.prompt_len, -_arrival(req))
    )
