"""What a request may say to the scheduler: time limits, priority, routing key."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tokenizer_manager.live_server import LiveServer

CHAT = "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}),
    ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}),
]
TIMEOUT_HEADERS = ("X-Request-Timeout-S", "X-Request-Waiting-Timeout-S")


@pytest.fixture
def with_priorities() -> Iterator[LiveServer]:
    with LiveServer(enable_priority_scheduling=True) as live:
        yield live


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_time_limits_in_headers_go_with_every_request(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    headers = {"X-Request-Timeout-S": "2.5", "X-Request-Waiting-Timeout-S": "1e-1"}
    assert server.post(path, body, headers).status == 200
    assert server.post(path, body).status == 200
    sent = [(request.timeout, request.waiting_timeout) for request in server.backend.requests]
    half = len(sent) // 2
    assert sent == [(2.5, 0.1)] * half + [(None, None)] * half


@pytest.mark.parametrize("name", TIMEOUT_HEADERS)
@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "inf", "1e999", "1e-999", "", "x", "1_0", "1,5", "0x10", "1 2", "9" * 99, "\u0661"]
)
def test_a_time_limit_that_is_no_positive_number_is_refused_by_name(
    shared_server: LiveServer, name: str, value: str
) -> None:
    path, body = BODIES[0]
    answer = shared_server.post(path, body, {name: value.encode().decode("latin-1")})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "invalid_value")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_priority_goes_with_every_request(with_priorities: LiveServer, path: str, body: dict[str, Any]) -> None:
    for priority in (2**31 - 1, -(2**31), 0, None):
        assert with_priorities.post(path, body | {"priority": priority}).status == 200
    sent = list(dict.fromkeys(request.priority for request in with_priorities.backend.requests))
    assert sent == [2**31 - 1, -(2**31), 0, None]


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.5, "1", True, [1], 10**40])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_priority_that_is_no_int32_is_refused_by_name(
    shared_server: LiveServer, path: str, body: dict[str, Any], priority: Any
) -> None:
    answer = shared_server.post(path, body | {"priority": priority})
    assert (answer.status, answer.error["param"]) == (400, "priority")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_priority_that_would_do_nothing_is_refused(
    shared_server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    for priority in (1, -1):
        answer = shared_server.post(path, body | {"priority": priority})
        assert (answer.status, answer.error["param"]) == (400, "priority")
        assert answer.error["code"] == "unsupported_parameter"
        assert "--enable-priority-scheduling" in answer.error["message"]
    for neutral in (0, None):
        assert shared_server.post(path, body | {"priority": neutral}).status == 200


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_routing_key_in_a_header_goes_with_every_request(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body, {"x-smg-routing-key": "tenant 7/a"}).status == 200
    assert {request.routing_key for request in server.backend.requests} == {"tenant 7/a"}


def test_a_routing_key_in_the_body_of_generate_comes_before_the_header(server: LiveServer) -> None:
    body = {"text": "a", "routing_key": "k" * 256, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body, {"X-SMG-Routing-Key": "other"}).status == 200
    assert server.backend.requests[0].routing_key == "k" * 256


@pytest.mark.parametrize("key", ["", "k" * 257, "a\tb", "a\u0085b"])
def test_a_routing_key_that_could_not_stand_in_a_log_is_refused_by_name(shared_server: LiveServer, key: str) -> None:
    answer = shared_server.post("/generate", {"text": "a", "routing_key": key})
    assert (answer.status, answer.error["param"]) == (400, "routing_key")
    path, body = BODIES[0]
    answer = shared_server.post(path, body, {"X-SMG-Routing-Key": key})
    assert (answer.status, answer.error["param"]) == (400, "X-SMG-Routing-Key")
