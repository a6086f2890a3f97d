"""One request through all four kinds of process; this file also runs against the installed wheel."""

from collections.abc import Iterator

import openai
import pytest
import requests

from tests.e2e.server_process import ServerProcess, serving


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("smollm2") as server:
        yield server


def test_an_openai_client_streams_a_chat_completion(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        stream = client.chat.completions.create(
            model="smollm2",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in {"stop", "length"}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 4


def test_the_page_is_served(server: ServerProcess) -> None:
    page = requests.get(server.url + "/ui", timeout=10)
    assert page.status_code == 200
    assert "<title>millstream</title>" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_sigterm_ends_it_cleanly() -> None:
    with serving("smollm2") as server:
        assert server.stop() == 0
