"""What is known of an HTTP call before its body is read."""

import asyncio
import math
import re
import secrets
from collections.abc import Mapping

import msgspec
from aiohttp import web

from .access import Caller
from .api_error import bad_request

REQUEST_ID = "X-Request-Id"
ANTHROPIC_PATH = "/v1/messages"
TIMEOUT = "X-Request-Timeout-S"
WAITING_TIMEOUT = "X-Request-Waiting-Timeout-S"
ROUTING_KEY = "X-SMG-Routing-Key"
MAX_ROUTING_KEY_LEN = 256
LABEL = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
NUMBER = re.compile(r"([0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12})(e[+-]?[0-9]{1,4})?", re.IGNORECASE)
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Call(msgspec.Struct):
    """One HTTP call: `request_id` is ours and unique, `label` is the client's own id.

    `timeout` and `waiting_timeout` are seconds from arrival that may lower the server's limits. `preparing` ends what is
    done before the requests are sent, where it takes too long.
    """

    arrival: float
    request_id: str
    label: str | None = None
    traceparent: str | None = None
    timeout: float | None = None
    waiting_timeout: float | None = None
    routing_key: str | None = None
    caller: Caller = Caller()
    preparing: asyncio.Timeout | None = None

    @property
    def name(self) -> str:
        """What the X-Request-Id header of the response says."""
        return self.label or self.request_id

    def is_sent(self) -> None:
        """Its requests are the scheduler's from now on, and so are its limits of time."""
        if self.preparing is not None:
            self.preparing.reschedule(None)


KEY = web.RequestKey("call", Call)


def new_call(request: web.Request, arrival: float) -> Call:
    """Begin a call; `call_of` finds it."""
    call = Call(arrival, secrets.token_hex(12))
    request[KEY] = call
    return call


def call_of(request: web.Request) -> Call:
    """The call of a request."""
    return request[KEY]


def id_headers(request: web.Request) -> dict[str, str]:
    """The headers of a response that tell the call's name: everywhere ours, and Anthropic's below its routes."""
    name = call_of(request).name
    return {REQUEST_ID: name, "request-id": name} if is_anthropic(request) else {REQUEST_ID: name}


def is_anthropic(request: web.Request) -> bool:
    """Whether the client speaks Anthropic's API, in errors too."""
    return request.path == ANTHROPIC_PATH or request.path.startswith(f"{ANTHROPIC_PATH}/")


def read_headers(call: Call, headers: Mapping[str, str]) -> None:
    """Keep what the client says there of its request; APIError naming a header that is wrong."""
    label, trace = headers.get(REQUEST_ID), headers.get("traceparent", "")
    if label is not None and not LABEL.fullmatch(label):
        message = f"{REQUEST_ID} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
        raise bad_request(message, REQUEST_ID, "invalid_request_id")
    call.label = label
    call.traceparent = trace if TRACEPARENT.fullmatch(trace) else None
    call.timeout = _read_seconds(headers, TIMEOUT)
    call.waiting_timeout = _read_seconds(headers, WAITING_TIMEOUT)
    call.routing_key = check_routing_key(headers.get(ROUTING_KEY), ROUTING_KEY)


def check_routing_key(key: str | None, param: str) -> str | None:
    """The key, or the APIError that names where it stands."""
    if key is not None and not (0 < len(key) <= MAX_ROUTING_KEY_LEN and key.isprintable()):
        raise bad_request(f"{param} must be 1 to {MAX_ROUTING_KEY_LEN} printable characters", param)
    return key


def _read_seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    seconds = float(text) if NUMBER.fullmatch(text) else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise bad_request(f"{name} must be a positive number of seconds", name)
    return seconds
