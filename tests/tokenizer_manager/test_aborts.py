"""Aborts: clients that go away, /abort_request, ids in flight."""

import socket
import struct
from typing import Any

import pytest

from tests.tokenizer_manager.live_server import LiveServer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
OPEN_CALLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "stream": True}),
    (CHAT, {"messages": HELLO}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 99, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 99}),
    ("/generate", {"text": "a", "stream": True}),
    ("/generate", {"text": "a"}),
]


@pytest.mark.parametrize(("path", "body"), OPEN_CALLS)
@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("after", ["before the first token", "after it"])
def test_a_closed_connection_aborts_at_once(
    shared_server: LiveServer, path: str, body: dict[str, Any], how: str, after: str
) -> None:
    server = shared_server
    before = len(server.backend.aborts)
    server.backend.paused = True
    connection = server.send("POST", path, body)
    server.until(lambda: server.backend.num_running > 0)
    if after == "after it":
        server.call(server.backend.step)
    rids = {request.rid for request in server.backend.requests[-server.backend.num_running :]}
    assert connection.sock is not None
    if how == "reset":
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        connection.sock.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    server.until(lambda: len(server.backend.aborts) > before, seconds=3)
    assert {rid for abort in server.backend.aborts[before:] for rid in abort.rids} == rids
    server.until(lambda: server.manager.num_inflight == 0 and server.manager.num_open == 0)
    connection.close()


def test_a_request_that_ended_is_not_aborted(server: LiveServer) -> None:
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status == 200
    assert server.events(CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True})
    server.until(lambda: server.manager.num_open == 0)
    assert server.backend.aborts == []


def test_the_same_id_twice_in_flight_is_refused_and_free_again_after_the_end(server: LiveServer) -> None:
    server.backend.paused = True
    first = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 2}, {"X-Request-Id": "mine"})
    server.until(lambda: server.backend.num_running == 1)
    again = server.post(CHAT, {"messages": HELLO, "rid": "mine"})
    assert (again.status, again.error["code"], again.error["param"]) == (400, "duplicate_request_id", "rid")
    server.call(server.backend.resume)
    with first, first.getresponse() as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "mine"
        response.read()
    assert server.post(CHAT, {"messages": HELLO, "rid": "mine", "max_tokens": 1}).status == 200


def test_an_id_is_free_at_once_when_its_client_has_gone(server: LiveServer) -> None:
    server.backend.paused, server.backend.answers_control = True, False
    server.send("POST", CHAT, {"messages": HELLO}, {"X-Request-Id": "mine"}).close()
    server.until(lambda: len(server.backend.aborts) == 1)
    assert server.call(lambda: server.manager.num_inflight) == 1
    server.backend.paused = False
    assert server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1}, {"X-Request-Id": "mine"}).status == 200


@pytest.mark.parametrize("name_of", ["label", "rid", "response id"])
def test_abort_request_ends_one_request_by_any_of_its_ids(server: LiveServer, name_of: str) -> None:
    server.backend.paused = True
    waiting = server.send("POST", CHAT, {"messages": HELLO, "rid": "mine"})
    other = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
    server.until(lambda: server.backend.num_running == 2)
    rid = next(request.rid for request in server.backend.requests if "mine" in request.rid)
    unique = rid.removeprefix("mine-")
    name = {"label": "mine", "rid": rid, "response id": f"chatcmpl-{unique}"}[name_of]
    assert server.post("/abort_request", {"rid": name}).json == {"num_aborted": 1}
    with waiting, waiting.getresponse() as response:
        assert response.status == 499
        assert b'"code":"request_aborted"' in response.read()
    server.call(server.backend.resume)
    with other, other.getresponse() as response:
        assert response.status == 200


def test_abort_all_ends_every_request_and_an_unknown_id_none(server: LiveServer) -> None:
    server.backend.paused = True
    waiting = [server.send("POST", CHAT, {"messages": HELLO}) for _ in range(3)]
    server.until(lambda: server.backend.num_running == 3)
    assert server.post("/abort_request", {"rid": "nobody"}).json == {"num_aborted": 0}
    assert server.post("/abort_request", {"abort_all": True}).json == {"num_aborted": 3}
    for connection in waiting:
        with connection, connection.getresponse() as response:
            assert response.status == 499


def test_an_abort_in_a_stream_is_its_last_event(server: LiveServer) -> None:
    server.backend.paused = True
    connection = server.send("POST", CHAT, {"messages": HELLO, "rid": "mine", "stream": True})
    server.until(lambda: server.backend.num_running == 1)
    server.call(server.backend.step)
    with connection, connection.getresponse() as response:
        assert response.status == 200
        server.post("/abort_request", {"rid": "mine"})
        lines = response.read().decode().split("\n\n")
    assert '"code":"request_aborted"' in lines[-2]
    assert lines[-1] == ""
