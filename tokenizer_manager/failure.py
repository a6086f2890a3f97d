"""The error that a failed request is answered with, on every route."""

from ..common.finish_reason import FINISH_ABORT
from ..common.text_messages import StrEnd
from .accounting import error_code
from .api_error import APIError
from .req_state import CLIENT_ABORT, ReqState


def failure(req: ReqState, end: StrEnd | None) -> APIError | None:
    """The error that an aborted request is answered with; None for every other end, and before it."""
    if end is None or not isinstance(end.finish_reason, FINISH_ABORT):
        return None
    reason = end.finish_reason
    status = reason.status_code if 400 <= reason.status_code < 600 else 500
    code = "request_aborted" if status == CLIENT_ABORT else error_code(reason)
    headers = {"Retry-After": str(req.retry_seconds)} if status in {429, 503} else {}
    return APIError(status, reason.message, code=code, headers=headers)
