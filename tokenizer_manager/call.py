"""What is known of an HTTP call before its body is read."""

import re
import secrets

import msgspec
from aiohttp import web

from .api_error import bad_request

REQUEST_ID = "X-Request-Id"
LABEL = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Call(msgspec.Struct):
    """One HTTP call: `request_id` is ours and unique, `label` is the client's own id."""

    arrival: float
    request_id: str
    label: str | None = None

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


def take_label(call: Call, header: str | None) -> None:
    """Keep the client's id, or raise the 400 that says what ids look like."""
    if header is None:
        return
    if not LABEL.fullmatch(header):
        message = f"{REQUEST_ID} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
        raise bad_request(message, REQUEST_ID, "invalid_request_id")
    call.label = header
