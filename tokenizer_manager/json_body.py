"""From the bytes of a request body to a struct, or to the 400 that names the field."""

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from .api_error import APIError, bad_request, http_error, too_deep, unsupported

BODY_SECONDS = 30.0
STRICT_PARAMS = web.AppKey("strict_params", bool)
ENCODINGS = ("identity", "gzip", "deflate")
ERROR_PATH = re.compile(r"(.*) - at `\$\.?(.*?)`$", re.DOTALL)
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
OUT_OF_RANGE = re.compile(r"Expected `\w+` (?:[<>]|of length|matching)")
MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
Label = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:\-]+\Z")]

MAX_PARAM_LEN = 200

T = TypeVar("T")


async def read_json(request: web.Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """Read and decode the body; APIError 400, 408, 413 or 415."""
    if request.content_type != "application/json":
        raise http_error(415)
    if request.headers.get("Content-Encoding", "identity").lower() not in ENCODINGS:
        raise http_error(415, close=True)
    body = await _read_body(request)
    if request.app.get(STRICT_PARAMS):
        kind: Any = decoder.type
        decoder = strict_decoder(kind)
    return decode(body, decoder)


@functools.cache
def strict_decoder(kind: Any) -> Any:
    """A decoder of the same struct that refuses fields which the struct does not have (at its top, not within)."""
    return msgspec.json.Decoder(msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True))


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
        raise too_deep() from None
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), at) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None


def _wrong_value(text: str, at: str) -> APIError:
    found = ERROR_PATH.match(text)
    message, path = found.groups() if found else (text, "")
    missing, unknown = MISSING_FIELD.match(message), UNKNOWN_FIELD.match(message)
    named = missing or unknown
    names = [name for name in (at, path, named.group(1) if named else "") if name]
    param = ".".join(names)[:MAX_PARAM_LEN] or None
    if missing:
        return bad_request(f"{param} is required", param, "missing_field")
    if unknown:
        return bad_request(f"{param} is not a field of this route", param, "unknown_parameter")
    code = "invalid_value" if OUT_OF_RANGE.match(message) else "invalid_type"
    return bad_request(f"{param}: {message}" if param else f"The body: {message}", param, code)


def salt_of(cache_salt: str | None, extra_key: str | None) -> str | None:
    """The one that is given: `extra_key` is SGLang's name of it."""
    if cache_salt is not None and extra_key is not None:
        raise bad_request("extra_key is another name of cache_salt; give one of them", "extra_key")
    return extra_key if cache_salt is None else cache_salt


def check_unsupported(body: msgspec.Struct, neutral: Mapping[str, Sequence[Any]], at: str = "") -> None:
    """Raise the 400 that names the first field which asks for what is not there yet.

    `neutral` holds the fields, with the values beside null that ask for nothing.
    """
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and not any(type(value) is type(same) and value == same for same in values):
            raise unsupported(at + name)
