"""Random bodies: whatever arrives, the answer is an answer or a 4xx in the one shape, and the next request works."""

import contextlib
import json
import re
import socket
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tokenizer_manager.live_server import LiveServer

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NUMBERS = st.one_of(
    st.integers(), st.integers(-3, 300), st.floats(allow_nan=False), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 0])
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]) | VALUES, "content": st.text(max_size=9) | VALUES}
    ),
    max_size=3,
)
FIELDS = (
    *("model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "stream_options", "rid", "priority", "cache_salt", "n", "logprobs"),
    *(
        "routing_key",
        "stop_regex",
        "tools",
        "echo",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "no_stop_trim",
    ),
)
SAMPLING = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "stop", "stop_token_ids", "sampling_seed", "n")


def some_of(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=3)


BODIES = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), st.builds(lambda a, b: {"messages": a, **b}, MESSAGES, some_of(FIELDS))),
    st.tuples(
        st.just("/v1/completions"),
        st.builds(lambda a, b: {"prompt": a, "max_tokens": 2, **b}, st.text(max_size=9) | VALUES, some_of(FIELDS)),
    ),
    st.tuples(
        st.just("/generate"),
        st.builds(
            lambda a, b, c: {**a, "sampling_params": b, **c},
            some_of(("text", "input_ids")),
            some_of(SAMPLING),
            some_of(FIELDS),
        ),
    ),
    st.tuples(st.sampled_from(["/tokenize", "/detokenize", "/abort_request"]), some_of(("prompt", "tokens", "rid"))),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/generate"]), VALUES),
)


def check(server: LiveServer, path: str, raw: bytes) -> None:
    answer = server.request("POST", path, raw=raw)
    assert answer.status < 500, (path, raw, answer.body)
    if answer.status != 200:
        assert answer.error["type"] in {"invalid_request_error", "not_found_error"}


@SETTINGS
@given(BODIES)
def test_no_json_body_brings_a_5xx(shared_server: LiveServer, request_: tuple[str, Any]) -> None:
    path, body = request_
    check(shared_server, path, json.dumps(body).encode())


@SETTINGS
@given(st.binary(min_size=1, max_size=60) | st.text(min_size=1, max_size=60).map(str.encode))
def test_no_bytes_bring_a_5xx(shared_server: LiveServer, raw: bytes) -> None:
    check(shared_server, "/v1/chat/completions", raw)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200), st.sampled_from([b"", b"GET / HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\nHost: x\r\n"])
)
def test_no_bytes_at_the_port_bring_a_5xx(shared_server: LiveServer, raw: bytes, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shared_server.port), timeout=5) as client:
        client.sendall(head + raw + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                answer += piece
    assert not re.search(rb"HTTP/1\.[01] 5", answer)


def test_after_all_that_a_normal_request_works_and_nothing_is_left(shared_server: LiveServer) -> None:
    answer = shared_server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})
    assert answer.json["choices"][0]["text"] == "ab"
    shared_server.until(lambda: shared_server.manager.num_inflight == 0 and shared_server.manager.num_open == 0)
    assert shared_server.backend.num_running == 0
