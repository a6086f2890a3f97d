"""GET /ui: one page for a person, without a build step and without anything from elsewhere."""

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

PAGE = Path(__file__).parent / "ui.html"
INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class UIRoute:
    """The page, read once. It may run its own script and talk to this server, and nothing else."""

    def __init__(self) -> None:
        self._page = PAGE.read_bytes()
        self._headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": _policy(self._page),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    async def page(self, request: web.Request) -> web.Response:
        """GET /ui."""
        return web.Response(body=self._page, headers=self._headers)


def _policy(page: bytes) -> str:
    """Content-Security-Policy: the page's own script and style by their hashes, and this server."""
    hashes = {
        kind.decode(): f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
        for kind, text in INLINE.findall(page)
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
