"""Streams and slow readers."""

import socket
import time

import pytest

from millstream.tokenizer_manager import sse
from tests.tokenizer_manager.live_server import LiveServer, parse_events

GENERATE = "/generate"


def open_slow_stream(server: LiveServer, text_len: int) -> socket.socket:
    """A client with a small window, that has sent its request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    body = b'{"text":"%b","stream":true,"sampling_params":{"max_new_tokens":null}}' % (b"a" * text_len)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)
    server.until(lambda: server.backend.num_running == 1)
    return client


def read_all(client: socket.socket) -> bytes:
    """Read until a chunked body ends, and take the chunks apart."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = client.recv(65536)
        assert piece
        data += piece
    body, rest = b"", data.split(b"\r\n\r\n", 1)[1]
    while True:
        size, rest = rest.split(b"\r\n", 1)
        if size == b"0":
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def test_tokens_that_come_while_a_reader_is_slow_leave_in_one_event(server: LiveServer) -> None:
    server.backend.paused = True
    client = open_slow_stream(server, 1)
    with client:
        for _ in range(298):  # events grow with the text so far: in all they are far beyond the buffers
            server.call(server.backend.step)
        server.until(lambda: server.manager.num_open == 1)
        server.call(server.backend.step)
        events = list(parse_events(read_all(client)))
    assert events[-1] == "[DONE]"
    assert events[-2]["text"] == "a" * 299
    assert len(events) < 299


def test_a_reader_that_has_stopped_is_cut_off_and_its_request_aborted(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_SECONDS", 0.2)
    server.backend.paused = True
    client = open_slow_stream(server, 1)
    with client:
        for _ in range(298):
            server.call(server.backend.step)
        server.until(lambda: len(server.backend.aborts) == 1, seconds=5)
        server.until(lambda: server.num_connections == 0)
    assert server.metric("slow_clients_total") == 1


def test_a_character_in_the_making_is_no_event(server: LiveServer) -> None:
    body = {"prompt": "\u00e9\u20ac", "max_tokens": 10, "stream": True}
    events = server.events("/v1/completions", body)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["\u00e9", "\u20ac", "\u00e9", "\u20ac"]


def test_other_clients_do_not_wait_for_a_slow_one(server: LiveServer) -> None:
    server.backend.paused = True
    client = open_slow_stream(server, 1)
    with client:
        for _ in range(298):
            server.call(server.backend.step)
        server.call(server.backend.resume)
        begin = time.monotonic()
        assert server.post(GENERATE, {"text": "abc", "sampling_params": {"max_new_tokens": 5}}).status == 200
        assert time.monotonic() - begin < 5
