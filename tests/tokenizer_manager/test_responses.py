"""POST /v1/responses as OpenAI's own client sends and reads it."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.tokenizer_manager.live_server import MODEL, LiveServer
from tests.tokenizer_manager.test_anthropic_messages import prompts

PROMPT = "u:hello\na:"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 3,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def stream_of(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the client's own model; there is no [DONE]."""
    connection, response = server.open("POST", "/v1/responses", {"model": MODEL, "stream": True, **body})
    with connection, response:
        assert response.status == 200
        blocks = response.read().decode().removesuffix("\n\n").split("\n\n")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def prompt_of(server: LiveServer, **body: Any) -> str:
    answer = server.post("/v1/responses", {"model": MODEL, "max_output_tokens": 1, **body})
    assert answer.status == 200, answer.body
    return prompts(server)[-1]


def test_a_whole_response_is_what_the_client_reads(server: LiveServer, client: openai.OpenAI) -> None:
    server.backend.num_cached = 3
    response = client.responses.create(
        model=MODEL, input="hello", instructions="be", max_output_tokens=4, metadata={"a": "b"}, store=True
    )
    Response.model_validate(response.to_dict(mode="json"))
    assert response.output_text == "s:be"
    assert (response.status, response.instructions, response.metadata) == ("incomplete", "be", {"a": "b"})
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len("s:be\n" + PROMPT), 4)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert not response.to_dict()["store"]


def test_the_events_come_in_order(server: LiveServer) -> None:
    events = stream_of(server, input="hello", max_output_tokens=3)
    assert [event["type"] for event in events] == TEXT_EVENTS
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == PROMPT[:3]


def test_a_stream_adds_up_to_the_whole_response(server: LiveServer, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 8}
    whole = client.responses.create(**asked).to_dict()
    with client.responses.stream(**asked) as stream:
        for event in stream:
            last = event
    assert last.type == "response.incomplete"
    assert without_ids(last.response.to_dict()) == without_ids(whole)


def test_log_probabilities_as_a_whole_and_in_every_event(server: LiveServer, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 3, "top_logprobs": 2}
    response = client.responses.create(**asked, include=["message.output_text.logprobs"])
    (message,) = Response.model_validate(response.to_dict(mode="json"), strict=True).output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text == PROMPT[:3]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]
    assert [bytes(entry.bytes).decode() for entry in part.logprobs] == list(part.text)
    assert response.top_logprobs == 2

    events = stream_of(server, **asked)
    whole = [entry.to_dict() for entry in part.logprobs]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for logprobs in deltas for entry in logprobs] == whole
    assert len(deltas) == 3
    last = {event["type"]: event for event in events}
    assert last["response.output_text.done"]["logprobs"] == whole
    assert last["response.content_part.done"]["part"]["logprobs"] == whole
    assert last["response.output_item.done"]["item"]["content"][0]["logprobs"] == whole
    assert last["response.incomplete"]["response"]["output"][0]["content"][0]["logprobs"] == whole


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from call to call."""
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ([{"role": "user", "content": "hello"}], PROMPT),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}], PROMPT),
        ([{"role": "developer", "content": "be"}, {"role": "user", "content": "hello"}], "s:be\n" + PROMPT),
        (
            [
                {"role": "user", "content": "hello"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I", "annotations": []}],
                },
                {"role": "user", "content": "hello"},
            ],
            "u:hello\na:I\nu:hello\na:",
        ),
    ],
)
def test_items_become_messages(server: LiveServer, given: Any, prompt: str) -> None:
    assert prompt_of(server, input=given) == prompt


def test_sampling_fields_reach_the_scheduler(server: LiveServer) -> None:
    prompt_of(server, input="hello", temperature=0.5, top_p=0.9, top_k=7, seed=5)
    params = server.backend.requests[-1].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x" * 400}, "input"),
    ],
)
def test_what_is_wrong_is_named(shared_server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = shared_server.post("/v1/responses", {"model": MODEL, "input": "hello", **body})
    assert answer.status == 400
    assert answer.error["param"] == param


def test_nothing_is_stored(server: LiveServer, client: openai.OpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call("resp_1")


def test_a_failure_in_a_stream_is_told_in_its_last_events(server: LiveServer) -> None:
    server.backend.fail_after = 2
    events = stream_of(server, input="hello")
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["message"] == "the worker gave up"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert [item["content"][0]["text"] for item in failed["output"]] == [PROMPT[:2]]


def test_a_response_can_be_aborted_by_its_id(server: LiveServer) -> None:
    server.backend.step_seconds = 0.01
    body = {"model": MODEL, "stream": True, "input": "hello"}
    connection, response = server.open("POST", "/v1/responses", body)
    with connection, response:
        request_id = response.headers["X-Request-Id"]
        assert server.post("/abort_request", {"rid": f"resp_{request_id}"}).status == 200
        assert b"event: response.failed" in response.read()
