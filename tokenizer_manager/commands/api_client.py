"""Asking a running server, for the commands that do: one GET, and its error in one line."""

from typing import Any

import aiohttp
import msgspec

ASK_SECONDS = 40.0  # a server itself gives up sooner


class NoAnswer(Exception):
    """The server can't be asked, or refuses; the message says why, in one line."""


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers that a key is sent in."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def get(base_url: str, path: str, api_key: str | None = None) -> bytes:
    """The body of a 200; NoAnswer for everything else."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)) as session,
            session.get(base_url + path, headers=headers_of(api_key)) as response,
        ):
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise NoAnswer(f"{base_url} cannot be reached: {why}") from error
    if status != 200:
        raise NoAnswer(error_message(base_url, status, body))
    return body


async def get_json(base_url: str, path: str, api_key: str | None = None) -> dict[str, Any]:
    """The JSON object of a 200; NoAnswer for everything else."""
    body = await get(base_url, path, api_key)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise NoAnswer(f"{base_url} answers, and not as a millstream server") from None


async def first_model(base_url: str, api_key: str | None = None) -> str:
    """The first model that the server lists."""
    listed = await get_json(base_url, "/v1/models", api_key)
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        raise NoAnswer(f"{base_url} lists no models") from None


def error_message(base_url: str, status: int, body: bytes) -> str:
    """What the server says of its error."""
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["error"]["message"])
    except (msgspec.DecodeError, LookupError, RecursionError, TypeError):
        return f"{base_url} answers with status {status}, and not as a millstream server"
