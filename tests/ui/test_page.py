"""/ui in a browser, in front of a server that echoes: every control does what it says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.common.messages import LoadProgress
from millstream.tokenizer_manager.access import Access
from tests.tokenizer_manager.live_server import LiveServer, byte_tokenizer
from tests.ui.browser import Browser, Page

PHONE = {"width": 360, "height": 640, "is_phone": True}
DESKTOP = {"width": 1280, "height": 800}
IS_DONE = "document.querySelector('#stop').hidden"


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer() as live:
        yield live


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Page:
    return open_page(browser, server, **DESKTOP)


def open_page(browser: Browser, server: LiveServer, **options: Any) -> Page:
    page = browser.open(server.url + "/ui", **options)
    page.wait("document.querySelector('#model').length === 2")
    return page


def ask(page: Page, text: str, *, waits: bool = True) -> None:
    page.click("#input")
    page.type(text)
    page.press("Enter")
    if waits:
        page.wait(f"{IS_DONE} && document.querySelector('#input').value === ''")


def set_value(page: Page, name: str, text: str) -> None:
    page.fill(f"[data-name={name}]", text)


def last_params(server: LiveServer) -> Any:
    return server.backend.requests[-1].sampling_params


def test_an_answer_streams_into_the_page(page: Page, server: LiveServer) -> None:
    server.backend.step_seconds = 0.02
    ask(page, "tell me", waits=False)
    page.wait("document.querySelector('.assistant .body')?.innerText.length > 6")
    assert page.js("!document.querySelector('#stop').hidden && document.querySelector('#send').hidden")
    page.click("#stop")
    page.wait(IS_DONE)
    server.until(lambda: not server.backend.num_running)
    assert page.text(".assistant .body").startswith("u:tell")
    assert "stopped" in page.text(".assistant .note")
    assert re.search(r"first token \d+ ms", page.text(".assistant .note"))
    assert not page.faults()


def test_the_conversation_goes_on_and_a_new_one_begins_empty(page: Page, server: LiveServer) -> None:
    page.click("#open-settings")
    set_value(page, "max_tokens", "4")
    ask(page, "one")
    ask(page, "two")
    assert server.backend.requests[-1].input_ids.startswith(server.backend.requests[0].input_ids)
    assert len(server.backend.requests[-1].input_ids) // 4 == len("u:one\na:u:on\nu:two\na:")
    assert "cut at the token limit" in page.text(".assistant .note")
    assert "4 tokens" in page.text(".assistant .note")
    page.click("#new")
    assert page.js("document.querySelectorAll('.message').length") == 0
    ask(page, "three")
    assert len(server.backend.requests[-1].input_ids) // 4 == len("u:three\na:")


def test_settings_reach_the_server_and_outlive_the_page(page: Page, server: LiveServer) -> None:
    page.click("#open-settings")
    for name, text in {"temperature": "0.3", "max_tokens": "5", "top_p": "0.9", "top_k": "7", "min_p": "0.1"}.items():
        set_value(page, name, text)
    set_value(page, "seed", "42")
    set_value(page, "stop", "##\n%%")
    set_value(page, "system", "be brief")
    page.load(server.url + "/ui")
    page.wait("document.querySelector('#model').length === 2")
    ask(page, "hi")
    params = last_params(server)
    assert (params.temperature, params.max_new_tokens, params.top_p, params.top_k) == (0.3, 5, 0.9, 7)
    assert (params.min_p, params.seed, params.stop) == (0.1, 42, ("##", "%%"))
    assert len(server.backend.requests[-1].input_ids) // 4 == len("s:be brief\nu:hi\na:")
    page.click("#open-settings")
    page.click("#defaults")
    page.click("#new")
    page.press("Escape")
    ask(page, "hi", waits=False)
    server.until(lambda: len(server.backend.requests) == 2)
    assert (last_params(server).temperature, last_params(server).stop) == (1.0, ())
    page.press("Escape")
    page.wait(IS_DONE)


def test_what_a_model_writes_is_text_and_never_markup(page: Page, server: LiveServer) -> None:
    page.click("#open-settings")
    set_value(page, "max_tokens", "90")
    page.press("Escape")
    ask(page, "<img src=x onerror='document.title=1'><script>document.title=2</script>")
    assert "<img src=x onerror='document.title=1'><script>" in page.text(".assistant .body")
    assert page.js("document.querySelector('#log').querySelectorAll('img, script').length") == 0
    assert page.js("document.title") == "millstream"


def test_code_stands_apart(page: Page) -> None:
    page.js("render(document.querySelector('#log'), 'before\\n```python\\nx = 1\\n```\\nafter')")
    assert page.js("[...document.querySelectorAll('#log > *')].map((part) => part.nodeName)") == ["DIV", "PRE", "DIV"]
    assert page.text("#log pre") == "x = 1\n"


def test_an_error_is_shown_and_the_message_is_not_lost(page: Page, server: LiveServer) -> None:
    ask(page, "x" * 400, waits=False)
    page.wait(IS_DONE + " && document.querySelector('.assistant .bad')")
    assert "context is 300 tokens" in page.text(".assistant .bad")
    assert page.js("getComputedStyle(document.querySelector('.assistant .bad')).color") == "rgb(168, 32, 26)"
    error, composer = (f"document.querySelector('{name}').getBoundingClientRect()" for name in (".bad", "#composer"))
    assert page.js(f"{error}.bottom <= {composer}.top"), "it is in view"
    assert page.js("document.querySelector('#input').value") == "x" * 400
    page.fill("#input", "")
    page.click("#open-settings")
    set_value(page, "max_tokens", "3")
    ask(page, "short")
    assert page.js("document.querySelectorAll('.assistant')[1].querySelector('.body').innerText") == "u:s"


def test_a_failure_in_a_stream_keeps_what_came(page: Page, server: LiveServer) -> None:
    server.backend.fail_after = 5
    ask(page, "hello", waits=False)
    page.wait(IS_DONE + " && document.querySelector('.assistant .bad')")
    assert page.text(".assistant .body") == "u:hel"
    assert "the worker gave up" in page.text(".assistant .bad")


def test_live_figures(page: Page, server: LiveServer) -> None:
    page.click("#open-settings")
    set_value(page, "max_tokens", "20")
    ask(page, "hi")
    server.call(lambda: server.backend.report_load(1, hits=3, output_tokens_total=100))
    page.wait("document.querySelector('#running')?.innerText === '3'")
    figures = {name: page.text("#" + name) for name in ("queued", "kv", "hits", "ttft")}
    assert figures["queued"] == "2"
    assert figures["kv"] == "25 %"
    assert figures["hits"] == "10 %"
    assert re.fullmatch(r"\d+ ms", figures["ttft"])
    server.call(lambda: server.backend.report_load(2, hits=3, output_tokens_total=500))
    page.wait("Number(document.querySelector('#rate')?.innerText) > 20")
    assert page.js("document.querySelector('#figures').classList.contains('stale')") is False


def test_a_key_is_asked_for_and_forgotten_with_the_tab(browser: Browser) -> None:
    with LiveServer(http={"access": Access(api_keys=["sesame"])}) as server:
        page = browser.open(server.url + "/ui", **DESKTOP)
        page.wait("document.querySelector('.hint.bad')")
        page.click("#open-settings")
        set_value(page, "max_tokens", "4")
        set_value(page, "key", "sesame")
        page.wait("document.querySelector('#model').length === 2")
        ask(page, "hi")
        assert page.text(".assistant .body") == "u:hi"
        assert page.js("JSON.stringify(localStorage).includes('sesame')") is False


def test_a_server_that_loads_says_how_far_it_is(browser: Browser) -> None:
    with LiveServer(ready=False) as server:
        server.call(lambda: server.backend.receive(LoadProgress(0, 45, 100)))
        page = browser.open(server.url + "/ui", **DESKTOP)
        page.wait("document.querySelector('.hint')?.innerText === 'The server is loading the model: 45 %'")
        server.call(lambda: server.manager.set_tokenizer(byte_tokenizer()))
        server.call(server.backend.report_ready)
        page.wait("document.querySelector('.hint')?.innerText === 'Ask echo something.'")


def test_reasoning_is_kept_apart(page: Page) -> None:
    page.js("answer = new Answer(); answer.add({choices: [{delta: {reasoning_content: 'let me see'}}]})")
    page.js("answer.add({choices: [{delta: {content: '42'}, finish_reason: 'stop'}]}); answer.end('', false)")
    assert page.text(".assistant .body") == "42"
    assert page.text(".assistant summary") == "Reasoning"
    page.click(".assistant summary")
    assert page.text(".assistant details .text") == "let me see"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_everything_is_within_reach(
    browser: Browser, server: LiveServer, tmp_path: Path, size: dict[str, Any], theme: str
) -> None:
    page = open_page(browser, server, theme=theme, **size)
    ask(page, "a-long-word-without-any-break-" * 4, waits=False)
    page.wait("document.querySelector('.assistant')?.innerText.length > 90")
    page.press("Escape")
    page.wait(IS_DONE)
    for selector in ("#new", "#open-settings", "#send", "#input", "#model"):
        assert_in_view(page, selector)
    page.fill("#input", "x" * 400)
    page.screenshot(tmp_path / "chat.png")
    assert page.js("document.documentElement.scrollWidth") <= size["width"]
    assert page.js("document.documentElement.scrollHeight") <= size["height"]
    assert min(page.js("[...document.querySelectorAll('button')].map((b) => b.offsetHeight).filter(Boolean)")) >= 40
    page.click("#open-settings")
    page.screenshot(tmp_path / "settings.png")
    for selector in ("[data-name=system]", "[data-name=key]", "#defaults", "#close-settings"):
        page.click(selector)
    is_dark = page.js("getComputedStyle(document.body).backgroundColor === 'rgb(20, 24, 26)'")
    assert is_dark == (theme == "dark")
    assert not page.faults()


def assert_in_view(page: Page, selector: str) -> None:
    x, y, right, bottom = page.js(
        f"(({{x, y, right, bottom}}) => [x, y, right, bottom])"
        f"(document.querySelector('{selector}').getBoundingClientRect())"
    )
    width, height = page.js("[innerWidth, innerHeight]")
    assert x >= 0, selector
    assert y >= 0, selector
    assert right <= width, selector
    assert bottom <= height, selector


def test_the_page_asks_nobody_else_and_runs_only_its_own_script(page: Page, server: LiveServer) -> None:
    ask(page, "hi", waits=False)
    page.press("Escape")
    page.wait(IS_DONE)
    urls = {url for url in page.requested_urls() if not url.startswith("data:")}
    assert urls <= {server.url + path for path in ("/ui", "/readyz", "/v1/models", "/v1/chat/completions", "/metrics")}
    page.js("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))")
    assert page.js("document.title") == "millstream"
    assert page.js("fetch('http://127.0.0.1:1/').then(() => 'sent', () => 'refused')") == "refused"
    assert [fault for fault in page.faults() if "Content Security Policy" in fault or "violates" in fault]
