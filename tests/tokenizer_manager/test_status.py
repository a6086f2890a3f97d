"""What the server says of itself and takes: starting, ready, draining, failed."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.common.finish_reason import FINISH_ABORT
from millstream.tokenizer_manager import prompt_encoder
from tests.tokenizer_manager.live_server import LiveServer, byte_tokenizer, parse_events

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
WORK: list[tuple[str, str, Any]] = [
    ("POST", CHAT, {"messages": HELLO}),
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/generate", {"text": "a"}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("POST", "/flush_cache", None),
    ("GET", "/health_generate", None),
    ("GET", "/readyz", None),
    ("GET", "/health", None),
]


@pytest.fixture
def starting() -> Iterator[LiveServer]:
    with LiveServer(ready=False) as live:
        yield live


def test_while_starting_it_is_alive_but_takes_no_work(starting: LiveServer) -> None:
    assert starting.request("GET", "/livez").json == {"status": "starting", "loaded": 0.0}
    for path in ("/", "/metrics", "/server_info", "/v1/models"):
        assert starting.request("GET", path).status == 200
    for method, path, body in WORK:
        answer = starting.request(method, path, body)
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert answer.error["type"] == "server_error"
        assert int(answer.headers["Retry-After"]) > 0


def test_it_is_ready_when_tokenizer_scheduler_and_detokenizer_are(starting: LiveServer) -> None:
    starting.call(starting.backend.report_ready)
    assert starting.request("GET", "/readyz").status == 503
    assert starting.request("GET", "/livez").json["loaded"] == 0.5
    starting.call(lambda: starting.manager.set_tokenizer(byte_tokenizer()))
    assert starting.request("GET", "/readyz").json["status"] == "ready"
    assert starting.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status == 200


def test_draining_refuses_new_work_and_finishes_what_runs(server: LiveServer) -> None:
    server.backend.paused = True
    plain = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 2})
    stream = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True})
    server.until(lambda: server.backend.num_running == 2)
    server.call(server.manager.start_draining)
    for method, path, body in WORK:
        answer = server.request(method, path, body)
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert answer.headers["Connection"] == "close"
        assert int(answer.headers["Retry-After"]) > 0
    assert server.request("GET", "/livez").status == 200
    idle = asyncio.run_coroutine_threadsafe(server.manager.wait_idle(), server._loop)
    server.call(server.backend.step)
    assert not idle.done()
    server.call(server.backend.resume)
    with plain, plain.getresponse() as response:
        assert response.status == 200
    with stream, stream.getresponse() as response:
        assert response.read().endswith(b"data: [DONE]\n\n")
    idle.result(5)


def test_a_request_that_is_tokenized_when_draining_begins_is_served(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(prompt_encoder, "INLINE_CHARS", 0)
    encode = server.manager.encoder.tokenizer.encode_batch

    def slow_encode(texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        begun.set()
        assert go_on.wait(5)
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(server.manager.encoder.tokenizer, "encode_batch", slow_encode)
    with server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1}) as waiting:
        assert begun.wait(5)
        server.call(server.manager.start_draining)
        go_on.set()
        with waiting.getresponse() as response:
            assert response.status == 200


def test_a_failure_answers_whoever_waits_for_a_flush(server: LiveServer) -> None:
    server.backend.answers_control = False
    with server.send("POST", "/flush_cache") as waiting:
        server.until(lambda: len(server.backend.received) == 1)
        server.call(lambda: server.manager.fail_all("the scheduler died"))
        with waiting.getresponse() as response:
            assert response.status == 503
            assert b"the scheduler died" in response.read()


def test_a_failure_ends_every_open_stream_with_an_event_and_every_waiting_request_with_a_500(
    server: LiveServer,
) -> None:
    server.backend.paused = True
    streams = [
        server.send("POST", path, body | {"stream": True})
        for path, body in (
            (CHAT, {"messages": HELLO}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/generate", {"text": "a"}),
        )
    ]
    server.until(lambda: server.backend.num_running == 4)
    server.call(server.backend.step)
    waiting = [
        server.send("POST", CHAT, {"messages": HELLO}),
        server.send("POST", "/generate", {"text": ["a", "b"]}),
        server.send("POST", CHAT, {"messages": HELLO, "stream": True}),
        server.send("GET", "/health_generate"),
    ]
    server.until(lambda: server.backend.num_running == 9)
    server.call(lambda: server.manager.fail_all("rank 1 died: out of memory"))
    for connection in streams:
        with connection, connection.getresponse() as response:
            *_, last = parse_events(response.read())
            assert last["error"]["code"] == "engine_failed"
            assert last["error"]["message"] == "rank 1 died: out of memory"
    for connection in waiting:
        with connection, connection.getresponse() as response:
            assert response.status in {500, 503}
            assert b'"type":"server_error"' in response.read()
    for path in ("/livez", "/readyz", "/health"):
        assert server.request("GET", path).status == 503
    assert server.post(CHAT, {"messages": HELLO}).error["code"] == "engine_failed"
    assert server.call(lambda: server.manager.num_inflight) == 0


def test_late_messages_after_a_failure_change_nothing(server: LiveServer) -> None:
    server.backend.paused = True
    connection = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
    server.until(lambda: server.backend.num_running == 1)
    server.call(lambda: server.manager.fail_all("gone"))
    server.call(server.backend.step)
    server.call(lambda: server.manager.fail_all("gone again"))
    with connection, connection.getresponse() as response:
        assert b'"message":"gone"' in response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "sent"), [(400, 400), (503, 503), (500, 500), (0, 500)])
def test_a_refusal_before_the_first_token_is_an_http_status(
    server: LiveServer, stream: bool, status: int, sent: int
) -> None:
    server.backend.refuse_with = FINISH_ABORT("It needs 900 tokens of 400.", status, "too_long")
    answer = server.post(CHAT, {"messages": HELLO, "stream": stream})
    assert answer.status == sent
    assert (answer.error["message"], answer.error["code"]) == ("It needs 900 tokens of 400.", "too_long")
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_a_failure_after_the_first_token_is_the_last_event(server: LiveServer) -> None:
    server.backend.fail_after = 3
    for path, body in ((CHAT, {"messages": HELLO}), ("/generate", {"text": "abc"})):
        *_, last = server.events(path, body | {"stream": True})
        assert last["error"]["code"] == "worker_error"
        assert last["error"]["type"] == "server_error"


def test_a_silent_scheduler_is_neither_alive_nor_ready(server: LiveServer) -> None:
    assert server.request("GET", "/livez").status == 200
    server.manager.clock = lambda: max(server.manager._last_heard.values()) + 31.0
    assert server.request("GET", "/livez").error["code"] == "not_alive"
    assert server.request("GET", "/readyz").status == 503
    server.call(lambda: server.backend.report_load(1))
    assert server.request("GET", "/livez").status in {200, 503}


def test_health_generate_really_generates(server: LiveServer) -> None:
    assert server.request("GET", "/health_generate").status == 200
    assert server.backend.requests[0].sampling_params.max_new_tokens == 1
    server.backend.refuse_with = FINISH_ABORT("no", 500, "")
    assert server.request("GET", "/health_generate").error["code"] == "not_alive"


def test_probes_at_once_are_one_and_nobody_who_probes_can_spoil_it(server: LiveServer) -> None:
    server.backend.paused = True
    headers = {"X-Request-Timeout-S": "0.001", "X-Request-Waiting-Timeout-S": "0.001", "X-Request-Id": "mine"}
    probes = [server.send("GET", "/health_generate", headers=headers) for _ in range(30)]
    server.until(lambda: server.manager.num_open == 30)
    (sent,) = server.backend.requests
    assert (sent.timeout, sent.waiting_timeout) == (None, None)
    assert not server.call(lambda: server.manager.find_requests("mine"))
    probes.pop(0).close()
    server.until(lambda: server.manager.num_open == 29)
    server.call(server.backend.resume)
    for probe in probes:
        with probe, probe.getresponse() as response:
            assert response.status == 200
    assert server.request("GET", "/health_generate").status == 200
    assert len(server.backend.requests) == 2


def test_the_cache_is_flushed_when_nothing_runs(server: LiveServer) -> None:
    assert server.request("POST", "/flush_cache").json == {"success": True, "message": "flushed"}
    server.backend.paused = True
    with server.send("POST", CHAT, {"messages": HELLO}):
        server.until(lambda: server.backend.num_running == 1)
        answer = server.request("POST", "/flush_cache")
        assert (answer.status, answer.error["code"]) == (400, "cache_in_use")


def test_models_are_listed_with_their_context_and_found_by_name(server: LiveServer) -> None:
    cards = server.request("GET", "/v1/models").json["data"]
    assert [card["id"] for card in cards] == ["echo", "org/echo"]
    assert cards[0]["max_model_len"] == 300
    assert server.request("GET", "/v1/models/echo").json == cards[0]
    for path in ("/v1/models/org/echo", "/v1/models/org%2Fecho"):
        assert server.request("GET", path).json == cards[1]
    missing = server.request("GET", "/v1/models/ecco")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert missing.error["message"].endswith("; served: echo, org/echo; did you mean echo?")


def test_server_info_tells_arguments_model_and_load(server: LiveServer) -> None:
    server.call(lambda: server.backend.report_load(7))
    info = server.request("GET", "/server_info").json
    assert info["status"] == "ready"
    assert info["args"]["port"] == server.port
    assert info["model"]["context_len"] == 300
    assert info["load"]["steps"] == 7


def test_the_index_lists_every_route_and_a_curl_line_for_this_server(server: LiveServer) -> None:
    page = server.request("GET", "/").body.decode()
    assert f"curl {server.url}/v1/chat/completions" in page
    for path in ("/v1/completions", "/generate", "/metrics", "/abort_request"):
        assert path in page
    assert server.request("HEAD", "/").status == 200
