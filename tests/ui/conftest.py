"""The browser of these tests, started once."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.ui.browser import Browser

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install chromium-headless-shell"


@pytest.fixture(scope="module")
def browser(system_tool: Callable[[str, str], str]) -> Iterator[Browser]:
    """Headless Chromium; skips where there is none."""
    tool = next((name for name in BROWSERS if shutil.which(name)), BROWSERS[0])
    with Browser(system_tool(tool, INSTALL)) as running:
        yield running
