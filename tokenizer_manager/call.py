"""What is known of an HTTP call before its body is read."""

import re
import secrets
from collections.abc import Mapping

import msgspec
from aiohttp import web

from .api_error import bad_request

REQUEST_ID = "X-Request-Id"
LABEL = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Call(msgspec.Struct):
    """One HTTP call: `request_id` is ours and unique, `label` is the client's own id."""

    arrival: float
    request_id: str
    label: str | None = None
    traceparent: str | None = None

    @property
    def name(self) -> str:
        """What the X-Request-Id header of the response says."""
        return self.label or self.request_id


KEY = web.RequestKey("call", Call)


def new_call(request: web.Request, arrival: float) -> Call:
    """Begin a call; `call_of` finds it."""
    call = Call(arrival, secrets.token_hex(12))
    request[KEY] = call
    return call


def call_of(request: web.Request) -> Call:
    """The call of a request."""
    return request[KEY]


def read_headers(call: Call, headers: Mapping[str, str]) -> None:
    """Keep the client's id and trace; APIError for an id that could not stand in a log."""
    label, trace = headers.get(REQUEST_ID), headers.get("traceparent", "")
    if label is not None and not LABEL.fullmatch(label):
        message = f"{REQUEST_ID} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
        raise bad_request(message, REQUEST_ID, "invalid_request_id")
    call.label = label
    call.traceparent = trace if TRACEPARENT.fullmatch(trace) else None
