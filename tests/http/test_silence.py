"""Streams that are silent for long, and clients that take nothing."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.tokenizer_manager import http_server, slow_clients
from tests.tokenizer_manager.live_server import MAX_BODY_BYTES, LiveServer, parse_events

COMMENT = b": keep-alive\n\n"
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 3, "stream": True}),
    ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}, "stream": True}),
    ("/v1/responses", {"input": "ab", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "stream": True}),
]


@pytest.fixture
def chatty() -> Iterator[LiveServer]:
    """A server that fills a silence of a tenth of a second."""
    with LiveServer(http={"keep_alive_seconds": 0.1}) as server:
        server.backend.paused = True
        yield server


@pytest.mark.parametrize(("path", "body"), STREAMS, ids=[path for path, _ in STREAMS])
def test_a_silent_stream_sends_comments_before_and_between_its_tokens(
    chatty: LiveServer, path: str, body: dict[str, Any]
) -> None:
    connection, response = chatty.open("POST", path, body)  # the headers come with the first comment
    with connection, response:
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Cache-Control"] == "no-store"
        taken = read_until(response, 2)
        chatty.call(chatty.backend.step)
        taken += read_until(response, 2)
        chatty.call(chatty.backend.resume)
        taken += response.read()
    assert taken.count(COMMENT) >= 4
    assert taken.startswith(COMMENT)
    events = taken.replace(COMMENT, b"")
    assert events.count(b"data: ") >= 2
    for event in events.decode().removesuffix("\n\n").split("\n\n"):
        data = event.rpartition("data: ")[2]
        assert data == "[DONE]" or json.loads(data)


def read_until(response: Any, num_comments: int) -> bytes:
    taken = b""
    while taken.count(COMMENT) < num_comments:
        taken += response.read1(4096)
    return taken


def test_a_request_that_fails_after_a_comment_ends_with_an_error_event(chatty: LiveServer) -> None:
    connection, response = chatty.open("POST", "/v1/completions", STREAMS[1][1] | {"rid": "silent"})
    with connection, response:
        taken = read_until(response, 1)
        chatty.post("/abort_request", {"rid": "silent"})
        taken += response.read()
    (error,) = parse_events(taken.replace(COMMENT, b""))
    assert response.status == 200
    assert "error" in error


def test_a_stream_without_silence_has_no_comments(chatty: LiveServer) -> None:
    chatty.call(chatty.backend.resume)
    answer = chatty.post("/v1/completions", STREAMS[1][1])
    assert COMMENT not in answer.body


def test_an_interval_of_0_sends_none() -> None:
    with LiveServer(http={"keep_alive_seconds": 0.0}) as server:
        server.backend.paused = True
        with server.send("POST", "/v1/completions", STREAMS[1][1]) as connection:
            server.until(lambda: server.backend.num_running == 1)
            time.sleep(0.3)
            server.call(server.backend.resume)
            assert COMMENT not in connection.getresponse().read()


def test_comments_do_not_pile_up_for_a_reader_that_has_stopped(chatty: LiveServer) -> None:
    def buffered() -> int:
        assert chatty.runner.server is not None
        (connection,) = chatty.runner.server.connections
        return int(connection.transport.get_write_buffer_size())

    with silent_client(chatty, "/generate", STREAMS[2][1] | {"sampling_params": {"max_new_tokens": 250}}):
        chatty.until(lambda: chatty.backend.num_running == 1)
        while not chatty.call(buffered):
            chatty.call(chatty.backend.step)
        before = chatty.call(buffered)
        time.sleep(0.5)
        assert chatty.call(buffered) == before


def test_a_client_that_does_not_take_a_whole_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNTAKEN_SECONDS", 1.0)
    with LiveServer() as server, silent_client(server, "/tokenize", {"prompt": "\x7f" * (MAX_BODY_BYTES // 7)}):
        server.until(lambda: server.num_connections == 1)
        server.until(lambda: server.num_connections == 0, seconds=15)
        assert server.manager.num_open == 0


WHOLE = {"prompt": "z" * (MAX_BODY_BYTES - 100)}  # its answer is more than the kernel takes


def test_a_client_that_takes_a_whole_answer_in_drops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "STALL_SECONDS", 0.3)
    with LiveServer() as server, silent_client(server, "/tokenize", WHOLE) as client:
        server.until(lambda: server.num_connections == 1)
        client.settimeout(5)
        while server.call(lambda: server.num_connections):
            assert client.recv(100)
            time.sleep(0.01)
        assert server.metric("slow_clients_total") == 1


def test_a_client_that_is_slow_but_reads_on_gets_its_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(slow_clients, "STALL_BYTES", 1000)
    with LiveServer() as server, silent_client(server, "/tokenize", WHOLE) as client:
        begin, taken = time.monotonic(), b""
        while not taken.endswith(b"}"):
            taken += client.recv(4096)
            time.sleep(0.02)
        assert time.monotonic() - begin > 0.4
        assert server.metric("slow_clients_total") == 0


def silent_client(server: LiveServer, path: str, body: Any) -> socket.socket:
    """A client with a small window that sends a request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    sent = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % (path.encode(), len(sent)) + sent)
    return client
