"""/ui over the packaged model: an answer of a model, and the server's own figures."""

import re
from pathlib import Path

from tests.e2e.server_process import ServerProcess
from tests.ui.browser import Browser

SETTINGS = {"temperature": "0", "max_tokens": "40"}


def test_a_person_asks_and_sees_what_the_server_does(
    browser: Browser, default_server: ServerProcess, tmp_path: Path
) -> None:
    page = browser.open(default_server.url + "/ui", width=1280, height=800)
    page.wait("document.querySelector('#model').value === 'smollm2'")
    page.click("#open-settings")
    for name, text in SETTINGS.items():
        page.fill(f"[data-name={name}]", text)
    page.click("#input")
    page.type("What is the capital of France?")
    page.press("Enter")
    page.wait("Number(document.querySelector('#rate')?.innerText) > 0")
    page.wait("document.querySelector('#stop').hidden")
    assert "Paris" in page.text(".assistant .body")
    assert re.search(r"first token \d+ ms, \d+ tokens, [\d.]+ tokens/s", page.text(".assistant .note"))
    page.wait("document.querySelector('#ttft')?.innerText.endsWith('ms')")
    page.wait("document.querySelector('#running')?.innerText === '0'")
    page.screenshot(tmp_path / "answered.png")
    assert not page.faults()
