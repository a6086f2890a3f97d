"""Headless Chromium, driven over its DevTools protocol: real clicks, real keys, and screenshots."""

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

ENDPOINT = re.compile(r"DevTools listening on (ws://\S+)")
PATIENCE_SECONDS = 30.0
T = TypeVar("T")


class Browser:
    """Use as a context. Its pages share nothing but the process."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._runner = asyncio.Runner()
        self._profile = tempfile.TemporaryDirectory(prefix="ms-ui-", ignore_cleanup_errors=True)
        self._next_id = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        command = [self._program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self._profile.name}"]
        self._log = Path(self._profile.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.run(self._connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            self.run(self._disconnect())
        self._process.wait(PATIENCE_SECONDS)
        self._runner.close()
        self._profile.cleanup()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it to its end."""
        return self._runner.run(coroutine)

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        return self.run(self._call(method, params or {}, session))

    def open(self, url: str, *, width: int, height: int, is_phone: bool = False, theme: str = "light") -> "Page":
        """A new page in a context of its own, loaded."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        page.load(url)
        return page

    async def _connect(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := ENDPOINT.search(self._log.read_text(errors="replace"))):
            assert self._process.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")
            await asyncio.sleep(0.02)
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(found[1], max_msg_size=0)

    async def _disconnect(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TypeError):
            await self._call("Browser.close", {}, None)
        await self._socket.close()
        await self._session.close()

    async def _call(self, method: str, params: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._next_id += 1
        command = {"id": self._next_id, "method": method, "params": params}
        await self._socket.send_json(command | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (message := await self._socket.receive_json()).get("id") != self._next_id:
                self.events.append(message)
        assert "error" not in message, f"{method}: {message}"
        return dict(message["result"])


class Page:
    """One page: what a person does, and what the page says."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command for this page."""
        return self._browser.call(method, params, self._session)

    def load(self, url: str) -> None:
        """Go there, also where the page is there already."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until an expression holds."""
        deadline = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not within {seconds} s: {condition}\n{self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A click in the middle of an element, which must be what lies there."""
        name = json.dumps(selector)
        self.js(f"document.querySelector({name}).scrollIntoView({{block: 'nearest'}})")
        x, y, is_hit = self.js(
            f"""(() => {{
              const target = document.querySelector({name}), box = target.getBoundingClientRect();
              const x = box.x + box.width / 2, y = box.y + box.height / 2;
              return [x, y, target.contains(document.elementFromPoint(x, y))];
            }})()"""
        )
        assert is_hit, f"{selector} is covered or hidden"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Enter or Escape."""
        code = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def fill(self, selector: str, text: str) -> None:
        """Replace what a field holds, and leave the field."""
        self.click(selector)
        self.js("document.activeElement.select()")
        self.type(text)
        self.js("document.activeElement.blur()")

    def screenshot(self, path: Path) -> Path:
        """A PNG of what is in view."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def faults(self) -> list[str]:
        """Errors in the console so far: of scripts, of the content policy, of failed loads."""
        self.js("0")  # what has happened is told by now
        found = []
        for event in self._events():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(str(params["entry"]))
        return found

    def requested_urls(self) -> set[str]:
        """Everything that the page asked for."""
        self.js("0")
        sent = [event for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in sent}

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]
