"""The one error shape: {"error": {"message", "type", "param", "code"}}, with OpenAI's types and string codes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

MAX_MESSAGE_LEN = 1000
RETRY_SECONDS = 2
CLIENT_CLOSED = 499
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """A request is refused or has failed. Raised anywhere below a handler, answered in one place."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LEN else message[: MAX_MESSAGE_LEN - 3] + "..."
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.close = close

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        return ERROR_TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")

    def renamed(self, names: Mapping[str, str]) -> "APIError":
        """The same error, where the client's API calls a field, or a part of its path, by another name."""
        ours, theirs = self.param or "", self.param or ""
        for name, other in names.items():
            theirs = theirs.replace(name, other)
        if theirs == ours:
            return self
        message = self.message.replace(ours, theirs)
        return APIError(self.status, message, code=self.code, param=theirs, headers=self.headers, close=self.close)

    def body(self) -> dict[str, Any]:
        """The JSON value, as a response or as an event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, Any] | None = None) -> web.Response:
        """The HTTP response; `body` is given where another API's clients read it."""
        response = json_response(self.body() if body is None else body, self.status)
        response.headers.update(self.headers)
        if self.close:
            response.force_close()
        return response


def json_response(value: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> APIError:
    """400."""
    return APIError(400, message, param=param, code=code)


def too_deep() -> APIError:
    """400: a value of the body nests so deeply that what works on it would recurse too far."""
    return bad_request("The JSON is nested too deeply.", code="json_too_deep")


def needed(value: Any, param: str) -> Any:
    """A value that a body must bring, or the 400 that says so."""
    if value is None:
        raise bad_request(f"{param} is required", param, "missing_field")
    return value


def unsupported(param: str, message: str | None = None) -> APIError:
    """400 for what the API knows and this server does not do yet."""
    return bad_request(message or f"{param} is not supported yet; leave it out", param, "unsupported_parameter")


def context_exceeded(context_len: int, prompt_size: str, param: str) -> APIError:
    """400: the prompt leaves no room for output. `prompt_size` is "9000 tokens", or a bound."""
    message = f"The context is {context_len} tokens, prompt and output together; the prompt alone has {prompt_size}."
    return bad_request(message, param, "context_length_exceeded")


def unauthorized() -> APIError:
    """401; it says nothing of what was wrong with the key."""
    message = "This route needs an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY."
    return APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def forbidden(message: str, code: str) -> APIError:
    """403."""
    return APIError(403, message, code=code)


def unavailable(message: str, code: str, *, close: bool = False) -> APIError:
    """503 with Retry-After."""
    return APIError(503, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)}, close=close)


def queue_full(message: str, retry_seconds: int) -> APIError:
    """429 with Retry-After."""
    return APIError(429, message, code="queue_full", headers={"Retry-After": str(retry_seconds)})


def internal_error() -> APIError:
    """500; what happened is in the log, not in the answer."""
    return APIError(500, "The server failed to handle this request.", code="internal_error")


HTTP_ERRORS = {
    404: ("There is no such route; GET / lists the routes.", "route_not_found"),
    405: ("This route does not take this method.", "method_not_allowed"),
    408: ("The request did not arrive in time.", "request_timeout"),
    413: ("The request body is too large.", "request_too_large"),
    415: (
        "The body must be JSON (Content-Type: application/json), as it is or in gzip or deflate.",
        "unsupported_media_type",
    ),
    417: ("The only expectation that can be met is 100-continue.", "expectation_failed"),
    431: ("The request line or a header is too long, or there are too many headers.", "headers_too_large"),
}


def http_error(status: int, headers: Mapping[str, str] | None = None, *, close: bool = False) -> APIError:
    """The error of a status that HTTP itself brings."""
    message, code = HTTP_ERRORS.get(status, ("The request is not valid HTTP.", "invalid_http"))
    return APIError(status, message, code=code, headers=headers, close=close)
