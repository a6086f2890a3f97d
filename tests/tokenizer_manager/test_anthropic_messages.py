"""POST /v1/messages as Anthropic's own client sends and reads it."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from millstream.common.finish_reason import FINISH_ABORT
from tests.tokenizer_manager.live_server import MODEL, LiveServer

HELLO: Any = [{"role": "user", "content": "hello"}]
SEALED: Any = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
PROMPT = "u:hello\na:"
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def prompts(server: LiveServer) -> list[str]:
    """What the scheduler was asked to continue, as text."""
    tokenizer = server.manager.encoder.tokenizer
    return [tokenizer.decode(unpacked(request.input_ids)) for request in server.backend.requests]


def unpacked(input_ids: bytes) -> list[int]:
    return [int.from_bytes(input_ids[at : at + 4], "little") for at in range(0, len(input_ids), 4)]


def prompt_of(server: LiveServer, **body: Any) -> str:
    answer = server.post("/v1/messages", {"model": MODEL, "max_tokens": 1, **body})
    assert answer.status == 200, answer.body
    return prompts(server)[-1]


def error_of(server: LiveServer, **body: Any) -> tuple[int, str, str]:
    answer = server.post("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": HELLO, **body})
    assert list(answer.json) == ["type", "error", "request_id"]
    assert answer.json["type"] == "error"
    assert answer.json["request_id"] == answer.headers["request-id"]
    return answer.status, answer.json["error"]["type"], answer.json["error"]["message"]


def test_a_whole_message_is_what_the_client_reads(server: LiveServer, client: anthropic.Anthropic) -> None:
    server.backend.num_cached = 3
    message = client.messages.create(model=MODEL, max_tokens=7, messages=HELLO)
    Message.model_validate(message.to_dict(), strict=True)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id.removeprefix("msg_")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", PROMPT[:7])]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    counts = message.usage
    assert (counts.input_tokens, counts.cache_read_input_tokens, counts.output_tokens) == (len(PROMPT) - 3, 3, 7)


def test_a_stream_adds_up_to_the_whole_message(server: LiveServer, client: anthropic.Anthropic) -> None:
    server.backend.num_cached = 3
    asked: Any = {"model": MODEL, "max_tokens": 40, "messages": HELLO, "stop_sequences": ["\n"]}
    whole = client.messages.create(**asked).to_dict()
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().to_dict()
    assert {**streamed, "id": ""} == {**whole, "id": ""}
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "\n")


def test_the_events_come_in_order_with_their_names(server: LiveServer) -> None:
    body = {"model": MODEL, "max_tokens": 3, "messages": HELLO, "stream": True}
    connection, response = server.open("POST", "/v1/messages", body)
    with connection, response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["X-Request-Id"]
        blocks = response.read().decode().removesuffix("\n\n").split("\n\n")
    names = []
    for block in blocks:
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: ")) if "ping" not in name else None
        assert event is None or name == f"event: {event.type}"
        names.append(name.removeprefix("event: "))
    assert names == [
        *["message_start", "ping", "content_block_start"],
        *["content_block_delta"] * 3,
        *["content_block_stop", "message_delta", "message_stop"],
    ]


def test_count_tokens_is_what_the_message_uses(server: LiveServer, client: anthropic.Anthropic) -> None:
    system = "be brief"
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system=system)
    message = client.messages.create(model=MODEL, max_tokens=1, messages=HELLO, system=system)
    assert counted.input_tokens == message.usage.input_tokens == len("s:be brief\n" + PROMPT)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"system": "be", "messages": HELLO}, "s:be\n" + PROMPT),
        ({"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "messages": HELLO}, "s:a\nb\n" + PROMPT),
        ({"system": "x-anthropic-billing-header: cch=1f;\nbe", "messages": HELLO}, "s:be\n" + PROMPT),
        ({"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "b"}], "messages": HELLO}, "s:b\n" + PROMPT),
        ({"messages": [{"role": "system", "content": "be"}, *HELLO]}, "s:be\n" + PROMPT),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, *HELLO]}, "s:a\nb\n" + PROMPT),
        ({"messages": [*HELLO, {"role": "user", "content": "you"}]}, "u:hello\nyou\na:"),
        ({"messages": [*HELLO, SEALED]}, "u:hello\na:"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}, *HELLO]}, "u:hello\na:I\nu:hello\na:"),
    ],
)  # fmt: skip
def test_a_prompt_is_made_of_system_and_messages(server: LiveServer, body: dict[str, Any], prompt: str) -> None:
    assert prompt_of(server, **body) == prompt


def test_sampling_fields_reach_the_scheduler(server: LiveServer) -> None:
    prompt_of(server, messages=HELLO, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["\n", "x"])
    params = server.backend.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 7, ("\n", "x"))


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "served: echo"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens must be at least 1"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [SEALED]}, 400, "invalid_request_error", "nothing that can be answered"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error", "[0].text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].tool_use_id",
        ),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"container": "c"}, 400, "invalid_request_error", "container"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "invalid_request_error", "prompt is too long"),
        ({"priority": 3}, 400, "invalid_request_error", "priority"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_the_shape_of_anthropic(
    shared_server: LiveServer, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    found_status, found_kind, message = error_of(shared_server, **body)
    assert (found_status, found_kind) == (status, kind)
    assert said in message


def test_errors_around_the_handlers_have_the_shape_too(server: LiveServer) -> None:
    for answer, kind in [
        (server.request("GET", "/v1/messages"), "invalid_request_error"),
        (server.request("POST", "/v1/messages", raw=b"{"), "invalid_request_error"),
        (server.request("POST", "/v1/messages/other", {}), "not_found_error"),
        (server.request("POST", "/v1/messages", raw=b"x" * 100_000), "request_too_large"),
    ]:
        assert answer.json["error"]["type"] == kind
        assert answer.json["type"] == "error"


def test_a_failure_in_a_stream_is_an_error_event(server: LiveServer, client: anthropic.Anthropic) -> None:
    server.backend.fail_after = 2
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream,
    ):
        stream.until_done()
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "api_error", "message": "the worker gave up"},
        "request_id": stream.response.headers["request-id"],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_is_a_status(server: LiveServer, client: anthropic.Anthropic, stream: bool) -> None:
    server.backend.refuse_with = FINISH_ABORT("too many wait", 429, "queue_full")
    with pytest.raises(anthropic.RateLimitError) as caught:
        client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, stream=stream)
    assert int(caught.value.response.headers["Retry-After"]) >= 1


def test_a_message_can_be_aborted_by_its_id_and_by_its_rid(server: LiveServer) -> None:
    server.backend.step_seconds = 0.01
    body = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "stream": True, "rid": "mine"}
    connection, response = server.open("POST", "/v1/messages", body)
    with connection, response:
        assert server.post("/abort_request", {"rid": "mine"}).status == 200
        assert b"event: error" in response.read()
