"""What is counted and logged of a request: when outputs come, and when it ends."""

import logging
import re

from ..common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from ..common.metrics import REFUSAL_CODES
from ..common.text_messages import StrEnd
from .metrics import Metrics
from .req_state import CLIENT_ABORT, ReqState

INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")

logger = logging.getLogger(__name__)


def error_code(reason: FINISH_ABORT) -> str:
    """The `code` of an error: its type in the scheduler's words, as QueueFull, becomes queue_full."""
    return INNER_CAPITAL.sub("_", reason.err_type).lower() or "request_failed"


def outcome(end: StrEnd) -> str:
    """The label of `num_requests_total`."""
    reason = end.finish_reason
    if isinstance(reason, FINISH_ABORT):
        return "abort" if reason.status_code == CLIENT_ABORT else "error"
    return "length" if isinstance(reason, FINISH_LENGTH) else "stop"


def observe_output(metrics: Metrics, req: ReqState, num_tokens: int, now: float) -> None:
    """Tokens of a streamed request have come: the first, or some more."""
    if req.last_output:
        metrics.observe("inter_token_latency_seconds", (now - req.last_output) / num_tokens, num_tokens)
    else:
        metrics.observe("time_to_first_token_seconds", now - req.arrival)
    req.last_output = now


def count_end(metrics: Metrics, req: ReqState, end: StrEnd, *, log: bool) -> None:
    """A request has ended; `log` is whether every end is logged, not only failures."""
    how, stats, seconds = outcome(end), end.stats, req.ended_at - req.arrival
    metrics.inc("num_requests_total", how)
    if req.counts_prompt:
        metrics.inc("prompt_tokens_total", by=stats.prompt_tokens)
        metrics.inc("cached_tokens_total", by=stats.cached_tokens)
    metrics.inc("generation_tokens_total", by=end.completion_tokens)
    metrics.observe("e2e_request_latency_seconds", seconds)
    if how == "abort":
        metrics.inc("num_aborted_requests_total")
    if isinstance(end.finish_reason, FINISH_ABORT) and how == "error":
        _count_failure(metrics, req, end.finish_reason)
    if log:
        logger.info(
            "request %s: %s after %.3f s, %d prompt tokens (%d cached), %d output tokens, %d retractions",
            *(req.rid, how, seconds, stats.prompt_tokens, stats.cached_tokens),
            *(end.completion_tokens, stats.num_retractions),
        )


def _count_failure(metrics: Metrics, req: ReqState, reason: FINISH_ABORT) -> None:
    """A full queue says enough by its counter: a warning for each refusal would flood the log."""
    code = error_code(reason)
    if code in REFUSAL_CODES:
        metrics.inc("num_refused_requests_total", code)
    level = logging.DEBUG if code == "queue_full" else logging.WARNING
    logger.log(level, "request %s: failed: %s", req.rid, reason.message)
