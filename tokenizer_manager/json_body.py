"""From the bytes of a request body to a struct, or to the 400 that names the field."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from .api_error import APIError, bad_request, http_error, unsupported

BODY_SECONDS = 30.0
ERROR_PATH = re.compile(r"(.*) - at `\$\.?(.*?)`$", re.DOTALL)
MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
Label = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:\-]+\Z")]

T = TypeVar("T")


async def read_json(request: web.Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """Read and decode the body; APIError 400, 408, 413 or 415."""
    if request.content_type != "application/json":
        raise http_error(415)
    return decode(await _read_body(request), decoder)


async def _read_body(request: web.Request) -> bytes:
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise http_error(413, close=True)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise http_error(408, close=True) from None
    except web.HTTPRequestEntityTooLarge:
        raise http_error(413, close=True) from None
    except (web.RequestPayloadError, aiohttp.ClientPayloadError, HttpProcessingError):
        raise APIError(400, "The body could not be read as its headers describe it.", code="invalid_body") from None


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]", at: str = "") -> T:
    """Decode JSON; the APIError's `param` is the field's path, below `at`."""
    try:
        body.decode()  # msgspec skips over what it does not keep; all of it must be UTF-8
        return decoder.decode(body)
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8 at byte {error.start}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The JSON is nested too deeply.", code="json_too_deep") from None
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), at) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None


def _wrong_value(text: str, at: str) -> APIError:
    found = ERROR_PATH.match(text)
    message, path = found.groups() if found else (text, "")
    missing = MISSING_FIELD.match(message)
    names = [name for name in (at, path, missing.group(1) if missing else "") if name]
    param = ".".join(names) or None
    if missing:
        return bad_request(f"{param} is required", param, "missing_field")
    return bad_request(f"{param}: {message}" if param else f"The body: {message}", param, "invalid_type")


def check_unsupported(body: msgspec.Struct, neutral: Mapping[str, Sequence[Any]], at: str = "") -> None:
    """Raise the 400 that names the first field which asks for what is not there yet.

    `neutral` holds the fields, with the values beside null that ask for nothing.
    """
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and not any(type(value) is type(same) and value == same for same in values):
            raise unsupported(at + name)
