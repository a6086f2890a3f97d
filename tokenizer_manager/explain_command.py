"""`millstream explain RID`: what became of a request of a running server, and why."""

import argparse
import asyncio
import sys
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from .explain_text import explanation_lines

ASK_SECONDS = 40.0  # the server itself gives up sooner


class NoExplanation(Exception):
    """There is none; the message says why, in one line."""


def main(argv: list[str]) -> int:
    """Print the timeline of one request; 1 where there is none, 2 for a bad command line."""
    parser = argparse.ArgumentParser(
        prog="millstream explain", allow_abbrev=False, description="Show what became of a request, and why it waited."
    )
    parser.add_argument("rid", metavar="RID", help="X-Request-Id, the id of a response, or the server's own rid")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        lines = asyncio.run(_explain(arguments.base_url.rstrip("/"), arguments.rid))
    except NoExplanation as error:
        print(f"millstream explain: error: {_printable(str(error))}", file=sys.stderr)
        return 1
    print("\n".join(map(_printable, lines)))
    return 0


async def _explain(base_url: str, rid: str) -> list[str]:
    body = await fetch_explanation(base_url, rid)
    try:
        return list(explanation_lines(body))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise NoExplanation(f"{base_url} does not answer as a millstream server") from None


def _printable(line: str) -> str:
    """A line without what would steer the terminal."""
    return "".join(char if char.isprintable() else "?" for char in line)


async def fetch_explanation(base_url: str, rid: str) -> dict[str, Any]:
    """The JSON of GET /debug/requests/{rid}; NoExplanation if the server knows none, or cannot be asked."""
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base_url}/debug/requests/{quote(rid, safe='')}") as response,
        ):
            status, text = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise NoExplanation(f"{base_url} cannot be reached: {why}") from error
    try:
        body: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        if status == 200:
            return body
        raise NoExplanation(body["error"]["message"])
    except (msgspec.DecodeError, KeyError, RecursionError, TypeError):
        raise NoExplanation(f"{base_url} answers with status {status}, and not as a millstream server") from None
