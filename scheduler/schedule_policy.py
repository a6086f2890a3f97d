"""The order in which waiting requests are considered."""

import bisect
from collections.abc import Callable, Mapping

from .req import Req


def _arrival(req: Req) -> float:
    return req.message.arrival


POLICIES: Mapping[str, Callable[[Req], float]] = {"fcfs": _arrival}  # --schedule-policy -> what the queue is sorted by


def enqueue(waiting_queue: list[Req], req: Req, policy: str) -> None:
    """Put a request in its place in the queue; a retracted one goes ahead of its equals."""
    insort = bisect.insort_left if req.num_retractions else bisect.insort_right
    insort(waiting_queue, req, key=POLICIES[policy])


def retraction_order(reqs: list[Req], max_retractions: int) -> list[Req]:
    """Who is retracted first, next, ...: shortest output first, then longest input; often retracted ones last."""
    return sorted(
        reqs, key=lambda req: (req.num_retractions >= max_retractions, req.num_outputs, -req.prompt_len, -_arrival(req))
    )
