"""`millstream explain RID`: what became of a request of a running server, and why."""

import argparse
import asyncio
import sys
from urllib.parse import quote

from .api_client import NoAnswer, get_json
from .explain_text import explanation_lines
from .terminal_text import printable


def main(argv: list[str]) -> int:
    """Print the timeline of one request; 1 where there is none, 2 for a bad command line."""
    parser = argparse.ArgumentParser(
        prog="millstream explain", allow_abbrev=False, description="Show what became of a request, and why it waited."
    )
    parser.add_argument("rid", metavar="RID", help="X-Request-Id, the id of a response, or the server's own rid")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's admin key, where it has keys")
    arguments = parser.parse_args(argv)
    try:
        lines = asyncio.run(_explain(arguments.base_url.rstrip("/"), arguments.rid, arguments.api_key))
    except NoAnswer as error:
        print(f"millstream explain: error: {printable(str(error))}", file=sys.stderr)
        return 1
    print("\n".join(map(printable, lines)))
    return 0


async def _explain(base_url: str, rid: str, api_key: str | None) -> list[str]:
    body = await get_json(base_url, f"/debug/requests/{quote(rid, safe='')}", api_key)
    try:
        return list(explanation_lines(body))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise NoAnswer(f"{base_url} does not answer as a millstream server") from None
