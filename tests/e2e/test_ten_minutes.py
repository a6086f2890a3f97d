"""A new user's first ten minutes with the packaged model: serve, ask in every way, look, break it, end it.

This file also runs against the installed wheel.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
import requests

from tests.e2e.server_process import READY_SECONDS, ServerProcess, environment, millstream, serving

PLAN = (
    "model",
    "architecture",
    "parameters",
    "dtype",
    "weights",
    "KV bytes a token",
    "KV tokens",
    "context",
    "max running requests",
    "tool call parser",
    "reasoning parser",
    "chunk size",
    "page size",
    "tp size",
    "device",
    "listening on",
)
QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": "smollm2", "temperature": 0}


class Person(pydantic.BaseModel):
    """What a model is asked to invent."""

    name: str = pydantic.Field(max_length=20)
    is_adult: bool


class Weather(pydantic.BaseModel):
    """Tell the weather."""

    city: str = pydantic.Field(max_length=20)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("smollm2") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_plan_comes_before_the_model_and_then_it_is_ready(server: ServerProcess) -> None:
    plan, _, ready = server.log.partition("ready in ")
    assert not [name for name in PLAN if not re.search(rf"^\s*{name}\s{{2,}}\S", plan, re.MULTILINE)]
    assert "loading weights: 100%" in plan
    assert float(ready.split()[0]) < READY_SECONDS
    assert f"s: {server.url}\nchat: {server.url}/ui\n" in ready


def test_the_curl_line_that_it_prints_works(server: ServerProcess) -> None:
    command = next(line for line in server.log.splitlines() if line.startswith("try: ")).removeprefix("try: ")
    shell = ["bash", "-c", command.replace("curl", "curl -sS", 1)]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")
    assert '"content"' in done.stdout


def test_the_root_says_in_a_line_each_what_the_routes_are(server: ServerProcess) -> None:
    page = requests.get(server.url + "/", timeout=5)
    assert page.status_code == 200
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate", "/ui", "/metrics", "/readyz"):
        assert re.search(rf"^(GET|POST)\s+{path}\s+\S", page.text, re.MULTILINE)
    assert f"curl {server.url}/v1/chat/completions" in page.text


def test_the_page_is_served(server: ServerProcess) -> None:
    page = requests.get(server.url + "/ui", timeout=10)
    assert page.status_code == 200
    assert "<title>millstream</title>" in page.text
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def test_a_chat_in_the_terminal(server: ServerProcess) -> None:
    command = [sys.executable, "-P", "-m", "millstream", "chat", "--base-url", server.url, "--temperature", "0"]
    lines = f"{QUESTION}\n/stats\n"
    done = subprocess.run(command, env=environment(), input=lines, capture_output=True, text=True, check=True)
    assert "Paris" in done.stdout
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s", done.stderr)


def test_openai_s_client_chats_streams_parses_and_calls(client: openai.OpenAI) -> None:
    chats = client.chat.completions
    text = chats.create(messages=MESSAGES, max_tokens=24, **GREEDY).choices[0].message.content
    assert text
    assert "Paris" in text
    usage: Any = {"include_usage": True}
    *chunks, last = chats.create(messages=MESSAGES, max_tokens=24, stream=True, stream_options=usage, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage
    assert last.usage.completion_tokens > 4
    invented: Any = [{"role": "user", "content": "Invent a person."}]
    parsed = chats.parse(messages=invented, response_format=Person, max_tokens=200, **GREEDY)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Weather)
    forced: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    (call,) = chats.create(messages=MESSAGES, **forced, **GREEDY).choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert Weather.model_validate_json(call.function.arguments)


def test_the_other_apis_answer(server: ServerProcess) -> None:
    bodies: dict[str, Any] = {
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 24, **GREEDY},
        "/v1/responses": {"input": QUESTION, "max_output_tokens": 24, **GREEDY},
        "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 8, **GREEDY},
        "/generate": {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
    }
    for path, body in bodies.items():
        assert "Paris" in server.post(path, body).text, path
    (item,) = server.post("/v1/embeddings", {"model": "smollm2", "input": QUESTION}).json()["data"]
    assert sum(value * value for value in item["embedding"]) == pytest.approx(1, abs=1e-3)


def stream(server: ServerProcess, max_tokens: int) -> requests.Response:
    """A streamed completion that has begun."""
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **GREEDY}
    return server.post("/v1/completions", body, stream=True)


def last_events(response: requests.Response) -> list[bytes]:
    """The last two."""
    return [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: ")][-2:]


def test_top_shows_what_runs(server: ServerProcess) -> None:
    with stream(server, 7000) as response:
        done = millstream("top", "--once", "--base-url", server.url)
        assert done.returncode == 0, done.stderr
        assert re.search(r"running 1 +queued 0", done.stdout)
        assert response.headers["X-Request-Id"] in done.stdout
        assert re.search(r"output [1-9][\d.]* tokens/s", done.stdout)


def test_explain_tells_the_life_of_a_request(server: ServerProcess) -> None:
    server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4, **GREEDY}, headers={"X-Request-Id": "why"})
    done = millstream("explain", "why", "--base-url", server.url)
    assert done.returncode == 0, done.stderr
    assert "(label why): ended, length" in done.stdout
    assert "ended by length after 4 output tokens" in done.stdout


def test_a_wrong_model_names_the_one_that_was_meant(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="smolm2", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    assert "served: smollm2; did you mean smollm2?" in raised.value.message


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="smollm2", prompt=" word" * 9000)
    assert raised.value.code == "context_length_exceeded"
    assert "8192" in raised.value.message
    assert "9000" in raised.value.message


def test_a_bad_schema_is_told_with_its_place(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "intger"}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, response_format=wanted)
    assert "#/properties/age" in raised.value.message


def test_an_unknown_flag_names_the_nearest() -> None:
    done = millstream("serve", "smollm2", "--max-runing-requests", "4")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        "unknown argument --max-runing-requests; did you mean --max-running-requests?"
    )


def test_a_taken_port_is_one_line_within_a_second(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    start = time.monotonic()
    done = millstream("serve", "smollm2", "--port", port)
    assert time.monotonic() - start < 3 * 1.0
    assert done.returncode == 2
    assert re.fullmatch(
        rf"millstream: error: port {port} on 127.0.0.1 is taken by process {server.process.pid} \([^)]+\); "
        rf"--port \d+ is free\n",
        done.stderr,
    )


def test_ctrl_c_lets_a_stream_end_and_leaves_nothing() -> None:
    with serving("smollm2") as server, stream(server, 100) as response:
        assert server.stop(signal.SIGINT) == 0
        event, mark = last_events(response)
        assert json.loads(event)["choices"][0]["finish_reason"] == "length"
        assert mark == b"[DONE]"


def test_a_worker_that_is_killed_ends_the_server_with_the_cause(server: ServerProcess) -> None:
    with stream(server, 7000) as response:
        server.child("tp_worker.0").kill()
        assert server.wait() == 1
        assert server.last_line == "millstream: error: tp_worker.0 was killed by SIGKILL"
        _, event = last_events(response)
        assert json.loads(event)["error"]["code"] == "engine_failed"
