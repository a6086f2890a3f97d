"""Streams and slow readers."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from millstream.tokenizer_manager import slow_clients
from tests.tokenizer_manager.live_server import CONTEXT_LEN, LiveServer, parse_events

GENERATE = "/generate"
MAX_TOKENS = CONTEXT_LEN - 50
PROMPT = "ab\u20ac"  # one token a byte: of five outputs, two have no text
OPENAI = {"max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}}


class Route(NamedTuple):
    """One way to stream, and how to read its events (without [DONE])."""

    path: str
    body: dict[str, Any]
    text: Callable[[list[Any]], str]
    completion_tokens: Callable[[list[Any]], int]
    finish_reasons: Callable[[list[Any]], list[str]]  # of all events, where there is one


def deltas(events: list[Any]) -> list[str]:
    choices = [choice for event in events for choice in event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


def reasons(events: list[Any]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]


ROUTES = {
    "completions": Route(
        "/v1/completions",
        {"prompt": PROMPT, **OPENAI},
        text=lambda events: "".join(deltas(events)),
        completion_tokens=lambda events: events[-1]["usage"]["completion_tokens"],
        finish_reasons=reasons,
    ),
    "chat": Route(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], **OPENAI},
        text=lambda events: "".join(deltas(events)),
        completion_tokens=lambda events: events[-1]["usage"]["completion_tokens"],
        finish_reasons=reasons,
    ),
    "generate": Route(
        GENERATE,
        {"text": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": MAX_TOKENS}},
        text=lambda events: events[-1]["text"],
        completion_tokens=lambda events: len(events[-1]["output_ids"]),
        finish_reasons=lambda events: [
            event["meta_info"]["finish_reason"]["type"] for event in events if event["meta_info"]["finish_reason"]
        ],
    ),
}


@contextmanager
def slow_reader(server: LiveServer, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client with a small window, that has sent its request and reads nothing; the backend makes steps when told."""
    server.backend.paused = True
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", server.port))
    sent = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % (path.encode(), len(sent)) + sent)
    server.until(lambda: server.backend.num_running == 1)
    with client:
        yield client


def step(server: LiveServer, num_steps: int) -> None:
    """So many tokens, each in a turn of the loop of its own."""
    for _ in range(num_steps):
        server.call(server.backend.step)


def expected_text(server: LiveServer, num_tokens: int) -> str:
    """What the echo of the only request says in so many tokens."""
    prompt = server.backend.requests[0].input_ids[::4]
    return (prompt * num_tokens)[:num_tokens].decode(errors="ignore")


class Reader:
    """Takes the events of a chunked body from a socket."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._raw = b""
        self._body = b""
        self._is_open = False

    def read(self, is_enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Read until these are the events."""
        while not is_enough(events := self._events()):
            piece = self._client.recv(65536)
            assert piece
            self._raw += piece
            self._take_chunks()
        return events

    def read_count(self, count: int) -> list[Any]:
        """Read until there are so many events."""
        return self.read(lambda events: len(events) >= count)

    def read_all(self) -> list[Any]:
        """All events, without [DONE]."""
        events = self.read(lambda events: events[-1:] == ["[DONE]"])
        return events[:-1]

    def _events(self) -> list[Any]:
        whole = self._body[: self._body.rfind(b"\n\n") + 2]
        return list(parse_events(whole)) if whole.endswith(b"\n\n") else []

    def _take_chunks(self) -> None:
        if not self._is_open and b"\r\n\r\n" in self._raw:
            self._is_open, self._raw = True, self._raw.split(b"\r\n\r\n", 1)[1]
        while self._is_open and b"\r\n" in self._raw:
            size, rest = self._raw.split(b"\r\n", 1)
            if len(rest) < int(size, 16) + 2:
                break
            self._body, self._raw = self._body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_tokens_that_come_while_a_reader_is_slow_leave_in_few_events_and_nothing_is_lost(
    server: LiveServer, route: Route
) -> None:
    with slow_reader(server, route.path, route.body) as client:
        step(server, MAX_TOKENS)
        server.until(lambda: server.manager.num_inflight == 0)
        events = Reader(client).read_all()
    assert route.text(events) == expected_text(server, MAX_TOKENS)
    assert route.completion_tokens(events) == MAX_TOKENS
    assert route.finish_reasons(events) == ["length"]
    assert len(events) < MAX_TOKENS / 3
    if "output_ids" in events[-1]:
        prompt = list(PROMPT.encode())
        assert events[-1]["output_ids"] == (prompt * MAX_TOKENS)[:MAX_TOKENS]


def test_what_waits_for_a_slow_reader_is_bounded(server: LiveServer) -> None:
    def buffered() -> int:
        assert server.runner.server is not None
        (connection,) = server.runner.server.connections
        return int(connection.transport.get_write_buffer_size())

    with slow_reader(server, "/v1/completions", ROUTES["completions"].body):
        for _ in range(MAX_TOKENS - 1):
            step(server, 1)
            assert server.call(buffered) < slow_clients.HIGH_WATER_BYTES + 1000
        assert server.call(buffered) > 0


def test_a_reader_that_goes_on_gets_what_waited_at_once_and_then_each_token_by_itself(server: LiveServer) -> None:
    with slow_reader(server, "/v1/completions", ROUTES["completions"].body | {"prompt": "a"}) as client:
        num_waited = MAX_TOKENS - 40
        step(server, num_waited)
        reader = Reader(client)
        events = reader.read(lambda events: len("".join(deltas(events))) == num_waited)
        assert max(map(len, deltas(events))) > num_waited / 3
        for number in range(1, 31):
            step(server, 1)
            later = reader.read_count(len(events) + number)
        assert deltas(later[len(events) :]) == ["a"] * 30


def test_tokens_that_come_in_one_go_leave_in_one_event(server: LiveServer) -> None:
    with slow_reader(server, "/v1/completions", ROUTES["completions"].body | {"prompt": "abcdef"}) as client:
        reader = Reader(client)
        for number in range(1, 4):
            server.call(lambda: [server.backend.step() for _ in range(5)])  # five messages of the detokenizer
            events = reader.read_count(number)
        assert deltas(events) == ["abcde", "fabcd", "efabc"]


def test_a_reader_that_has_stopped_is_cut_off_and_its_request_aborted(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_SECONDS", 0.2)
    with slow_reader(server, GENERATE, ROUTES["generate"].body):
        step(server, MAX_TOKENS - 1)
        server.until(lambda: len(server.backend.aborts) == 1, seconds=5)
        server.until(lambda: server.num_connections == 0)
    assert server.metric("slow_clients_total") == 1


def test_a_character_in_the_making_is_no_event(server: LiveServer) -> None:
    body = {"prompt": "\u00e9\u20ac", "max_tokens": 10, "stream": True}
    events = server.events("/v1/completions", body)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["\u00e9", "\u20ac", "\u00e9", "\u20ac"]


def test_other_clients_do_not_wait_for_a_slow_one(server: LiveServer) -> None:
    with slow_reader(server, GENERATE, ROUTES["generate"].body):
        step(server, MAX_TOKENS - 1)
        server.call(server.backend.resume)
        begin = time.monotonic()
        assert server.post(GENERATE, {"text": "abc", "sampling_params": {"max_new_tokens": 5}}).status == 200
        assert time.monotonic() - begin < 5
