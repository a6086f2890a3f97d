"""What became of a request: what the scheduler noted of it, joined with what its client saw; and which ones run."""

import time
from typing import Any

from aiohttp import web

from ...common.messages import ExplainReqOutput
from ..api_error import APIError, json_response
from ..call import call_of
from ..req_state import ReqState
from ..request_history import MAX_REQUESTS, ReqRecord
from ..tokenizer_manager import TokenizerManager

MAX_EXPLAINED = 100  # of one batch
MAX_LISTED = 1000


class ExplainRoutes:
    """Handlers over one tokenizer manager."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def running(self, request: web.Request) -> web.Response:
        """GET /v1/requests: the caller's requests that have not ended, oldest first; the admin's are all of them."""
        reqs, now = self._manager.running_reqs(call_of(request).caller), self._manager.clock()
        return json_response({"num_requests": len(reqs), "requests": [_running(req, now) for req in reqs[:MAX_LISTED]]})

    async def explain(self, request: web.Request) -> web.Response:
        """GET /debug/requests/{rid}: one object; for a batch, named by its call, `requests` holds one each (the first hundred)."""
        self._manager.check_started()
        records = self._manager.find_requests(request.match_info["rid"])
        if not records:
            message = f"No request has this id, or more than {MAX_REQUESTS} have ended since it did."
            raise APIError(404, message, param="rid", code="request_not_found")
        clock_offset = time.time() - self._manager.clock()
        explained = [
            explanation(record, await self._manager.explain(record.rid), clock_offset)
            for record in records[:MAX_EXPLAINED]
        ]
        if len(records) == 1:
            return json_response(explained[0])
        return json_response({"num_requests": len(records), "requests": explained})


def _running(req: ReqState, now: float) -> dict[str, Any]:
    """The JSON of one request that has not ended; tokens of one that does not stream come at its end."""
    return {
        "rid": req.rid,
        "label": req.label,
        "stream": req.stream,
        "seconds": round(now - req.arrival, 3),
        "first_output_seconds": _seconds_after(req.arrival, req.first_output),
        "prompt_tokens": req.prompt_len,
        "output_tokens": req.num_outputs,
    }


def explanation(record: ReqRecord, told: ExplainReqOutput, clock_offset: float) -> dict[str, Any]:
    """The JSON of one request. Seconds count from its arrival, `arrival_time` from 1970; null is "not yet"."""
    end = record.end
    return {
        "rid": record.rid,
        "label": record.label,
        "status": "ended" if end else told.status or "sent",
        "finish_reason": end.finish_reason.to_json() if end else None,
        "arrival_time": round(record.arrival + clock_offset, 3),
        "first_output_seconds": _seconds_after(record.arrival, record.first_output),
        "ended_seconds": _seconds_after(record.arrival, record.ended_at),
        "prompt_tokens": record.prompt_len,
        "cached_tokens": end.stats.cached_tokens if end else None,
        "completion_tokens": end.completion_tokens if end else None,
        "num_retractions": end.stats.num_retractions if end else None,
        "events": [
            {"seconds": event.seconds, "step": event.step, "what": event.what} | event.numbers for event in told.events
        ],
    }


def _seconds_after(arrival: float, when: float) -> float | None:
    return round(when - arrival, 6) if when else None
