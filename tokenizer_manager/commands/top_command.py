"""`millstream top`: the requests and figures of a running server, live."""

import argparse
import asyncio
import shutil
import sys
import time
from typing import Any

import msgspec

from .api_client import NoAnswer, first_model, get, get_json
from .terminal_text import printable
from .top_figures import Look, figures, read_metrics
from .top_text import table

REDRAW = "\x1b[H\x1b[J"
PLAIN_SIZE = (200, 60)
SHORTEST_SECONDS = 0.05


def main(argv: list[str]) -> int:
    """Show figures until Ctrl-C, or once; 1 where the server can't be asked, 2 for a bad command line."""
    options = _parse(argv)
    try:
        asyncio.run(_watch(options))
    except NoAnswer as error:
        print(f"millstream top: error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(options: argparse.Namespace) -> None:
    base_url = options.base_url.rstrip("/")
    title = f"millstream top   {await first_model(base_url, options.api_key)}   {base_url}"
    before = await look(base_url, options.api_key)
    while True:
        await asyncio.sleep(options.interval)
        now = await look(base_url, options.api_key)
        _show(f"{title}   {time.strftime('%H:%M:%S')}", figures(before, now), as_json=options.json)
        if options.once:
            return
        before = now


async def look(base_url: str, api_key: str | None) -> Look:
    """Ask a server; NoAnswer where it is none of ours."""
    text = (await get(base_url, "/metrics")).decode(errors="replace")
    values, outcomes = read_metrics(text)
    if not values:
        raise NoAnswer(f"{base_url} has no metrics of millstream's")
    requests = (await get_json(base_url, "/v1/requests", api_key))["requests"]
    return Look(time.monotonic(), values, outcomes, requests)


def _show(title: str, current: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(current).decode(), flush=True)
    elif sys.stdout.isatty():
        width, height = shutil.get_terminal_size()
        print(REDRAW + table(title, current, width=width, height=height), end="", flush=True)
    else:
        print(table(title, current, width=PLAIN_SIZE[0], height=PLAIN_SIZE[1]) + "\n", flush=True)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="millstream top", allow_abbrev=False, description="Show the requests and figures of a server, live."
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server; the admin's shows everyone's requests")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and end")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each look")
    return parser.parse_args(argv)


def _seconds(text: str) -> float:
    value = float(text)
    if not SHORTEST_SECONDS <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be from {SHORTEST_SECONDS:g} to 3600 seconds, not {text}")
    return value
