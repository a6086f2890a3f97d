"""Reasoning and tool calls, as Anthropic's messages and OpenAI's responses write them: whole, streamed, and sent back."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response

from tests.tokenizer_manager.agent_server import AgentServer
from tests.tokenizer_manager.live_server import MODEL
from tests.tokenizer_manager.test_anthropic_messages import prompts
from tests.tokenizer_manager.test_responses import stream_of, without_ids

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "the weather", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "weather", "description": "the weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>I look.</think>Wait:\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def agent_server() -> Iterator[AgentServer]:
    with AgentServer() as live:
        yield live


@pytest.fixture
def server(agent_server: AgentServer) -> AgentServer:
    agent_server.backend.tokens_per_step = 1
    return agent_server


@pytest.fixture(scope="module")
def claude(agent_server: AgentServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=agent_server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(agent_server: AgentServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def asked(text: str, **others: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 280,
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
        **others,
    }


def without_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    return {**message, "id": "", "content": blocks}


def test_a_message_holds_thinking_text_and_tool_uses(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**asked(ANSWER))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message.content
    assert thinking.type == "thinking"
    assert text.type == "text"
    assert first.type == second.type == "tool_use"
    assert (thinking.thinking, text.text.strip()) == ("I look.", "Wait:")
    assert thinking.signature
    assert first.input == second.input == {"city": "Rome"}
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize("max_tokens", [280, 100, 65, 20])
def test_a_stream_adds_up_to_the_whole_message(
    server: AgentServer, claude: anthropic.Anthropic, tokens_per_step: int, max_tokens: int
) -> None:
    server.backend.tokens_per_step = tokens_per_step
    body = asked(ANSWER, max_tokens=max_tokens)
    whole = claude.messages.create(**body).to_dict()
    with claude.messages.stream(**body) as stream:
        streamed = stream.get_final_message().to_dict()
    assert without_call_ids(streamed) == without_call_ids(whole)
    assert whole["stop_reason"] == ("tool_use" if max_tokens == 280 else "max_tokens")


def test_the_blocks_of_a_stream_follow_each_other(server: AgentServer) -> None:
    connection, response = server.open("POST", "/v1/messages", asked(ANSWER, stream=True))
    with connection, response:
        events = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: ")]
    seen = [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("delta", {}).get("type"))
        for event in events
        if "index" in event
    ]
    kinds = ["thinking_delta", "text_delta", "input_json_delta", "input_json_delta"]
    expected = []
    for index, kind in enumerate(kinds):
        signature = [("delta", index, "signature_delta")] if index == 0 else []
        expected += [("start", index, None), ("delta", index, kind), *signature, ("stop", index, None)]
    assert list(dict.fromkeys(seen)) == expected
    assert seen == sorted(seen, key=lambda change: change[1])


def test_what_was_called_and_answered_is_shown_to_the_template(server: AgentServer) -> None:
    history = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "x"},
                {"type": "text", "text": "Wait:"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    assert server.post("/v1/messages", asked("", messages=history, max_tokens=1)).status == 200
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert server.renderer.messages == [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "Wait:",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sunny"},
        {"role": "user", "content": "and?"},
    ]
    described = {"name": "weather", "description": "the weather", "parameters": SCHEMA}
    assert server.renderer.tools == [{"type": "function", "function": described}]


@pytest.mark.parametrize(
    ("thinking", "is_enabled"), [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)]
)
def test_thinking_is_a_switch_of_the_template(server: AgentServer, thinking: Any, is_enabled: bool) -> None:
    server.post("/v1/messages", asked("hello", thinking=thinking, max_tokens=1))
    assert server.renderer.kwargs == {"enable_thinking": is_enabled}


def test_tools_of_other_kinds_are_ignored_and_said_so(server: AgentServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    message = server.post("/v1/messages", asked("hello", tools=[search, TOOL])).json
    assert message["warnings"] == ["tools[0]: the type web_search_20250305 is not served here and was ignored"]
    assert len(server.renderer.tools or ()) == 1
    response = server.post(
        "/v1/responses", {"model": MODEL, "input": "hello", "tools": [{"type": "web_search"}, FUNCTION]}
    ).json
    assert response["warnings"] == ["tools[0]: the type web_search is not served here and was ignored"]
    assert [tool["name"] for tool in response["tools"]] == ["weather"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/messages", asked("x", tool_choice={"type": "tool", "name": "other"}), "other"),
        ("/v1/messages", asked("x", tools=[], tool_choice={"type": "any"}), "needs tools"),
        ("/v1/messages", asked("x", tools=[{**TOOL, "name": "a b"}]), "tools[0].name"),
        ("/v1/messages", asked("x", tools=[{**TOOL, "input_schema": {"type": "array"}}]), "tools[0].input_schema"),
        ("/v1/messages", asked("x", tools=[{"name": "f"}]), "tools[0].input_schema is required"),
        (
            "/v1/responses",
            {"model": MODEL, "input": "x", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "o"}},
            "'o'",
        ),
        ("/v1/responses", {"model": MODEL, "input": "x", "tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
    ],
)
def test_wrong_tools_are_named_as_the_client_wrote_them(
    server: AgentServer, path: str, body: dict[str, Any], said: str
) -> None:
    answer = server.post(path, body)
    assert answer.status == 400
    assert said in answer.json["error"]["message"]


def test_a_response_holds_reasoning_a_message_and_function_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=ANSWER, tools=[FUNCTION])  # type: ignore[list-item]
    Response.model_validate(response.to_dict(mode="json"))
    reasoning, message, first, second = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "I look."
    assert message.type == "message"
    assert response.output_text.strip() == "Wait:"
    assert first.type == second.type == "function_call"
    assert json.loads(first.arguments) == json.loads(second.arguments) == {"city": "Rome"}
    assert first.call_id != second.call_id
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize("max_tokens", [280, 65, 20])
def test_a_stream_adds_up_to_the_whole_response(
    server: AgentServer, client: openai.OpenAI, tokens_per_step: int, max_tokens: int
) -> None:
    server.backend.tokens_per_step = tokens_per_step
    body: Any = {"model": MODEL, "input": ANSWER, "tools": [FUNCTION], "max_output_tokens": max_tokens}
    whole = client.responses.create(**body).to_dict()
    events = stream_of(server, **body)
    streamed = events[-1]["response"]
    assert without_item_ids(streamed) == without_item_ids(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed["output"]


def without_item_ids(response: dict[str, Any]) -> dict[str, Any]:
    known = without_ids(response)
    return {**known, "output": [{**item, "call_id": ""} for item in known["output"]]}


def test_the_events_of_items_come_in_order(server: AgentServer) -> None:
    events = stream_of(server, input=ANSWER, tools=[FUNCTION])
    kinds = [event["type"].removeprefix("response.") for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected = ["created", "in_progress"]
    for item in (reasoning, text, call, call):
        expected += ["output_item.added", *item, "output_item.done"]
    without_repeats = [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1]]
    assert without_repeats == [*expected, "completed"]
    for index in range(4):
        deltas = [
            event["delta"] for event in events if event["type"].endswith("delta") and event["output_index"] == index
        ]
        (done,) = [
            event
            for event in events
            if event["type"].endswith(("text.done", "arguments.done")) and event["output_index"] == index
        ]
        assert "".join(deltas) == done.get("text", done.get("arguments"))


def test_a_response_can_be_sent_back_as_input(server: AgentServer, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=ANSWER, tools=[FUNCTION])  # type: ignore[list-item]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    given: Any = [{"role": "user", "content": "hello"}, *first.output, *outputs]
    client.responses.create(model=MODEL, input=given, instructions="be", max_output_tokens=1)
    assert [message["role"] for message in server.renderer.messages] == ["system", "user", "assistant", "tool", "tool"]
    assistant = server.renderer.messages[2]
    assert assistant["reasoning_content"] == "I look."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Rome"}] * 2
    assert prompts(server)[-1] == "sunny"


@pytest.mark.parametrize("depth", [60, 300, 600, 900])
def test_schemas_of_any_depth_are_served_or_refused(server: AgentServer, depth: int) -> None:
    schema = '{"properties":{"a":' * (depth // 2) + "{}" + "}}" * (depth // 2)
    tool = f'{{"name":"f","input_schema":{schema}}}'
    body = f'{{"max_tokens":1,"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    function = f'{{"type":"function","name":"f","parameters":{schema}}}'
    response = f'{{"max_output_tokens":1,"input":"x","tools":[{function}]}}'
    for path, raw in [("/v1/messages", body), ("/v1/responses", response)]:
        answer = server.request("POST", path, raw=raw.encode())
        assert answer.status == 200 or "nested too deeply" in answer.json["error"]["message"]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_log_probabilities_of_the_text_alone_however_many_tokens_come_at_once(server: AgentServer, step: int) -> None:
    server.backend.tokens_per_step = step
    body = {"model": MODEL, "input": ANSWER, "tools": [FUNCTION], "top_logprobs": 1}
    whole = server.post("/v1/responses", body).json["output"]
    events = stream_of(server, **body)
    for output in (whole, events[-1]["response"]["output"]):
        (message,) = [item for item in output if item["type"] == "message"]
        assert "".join(entry["token"] for entry in message["content"][0]["logprobs"]) == "Wait:"
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(entry["token"] for logprobs in deltas for entry in logprobs) == "Wait:"
    chat = asked(ANSWER, tools=[{"type": "function", "function": {"name": "weather"}}], logprobs=True)
    (choice,) = server.post("/v1/chat/completions", chat).json["choices"]
    chunks = server.events("/v1/chat/completions", {**chat, "stream": True})[:-1]
    streamed = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in streamed).startswith(ANSWER)
