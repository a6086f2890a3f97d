"""Tools and reasoning over HTTP: what is asked, what is refused, and the same answer as a whole and as a stream."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from millstream.tokenizer_manager.chat.chat_family import ChatFamily
from millstream.tokenizer_manager.chat.template_habits import TemplateHabits
from tests.tokenizer_manager.agent_server import AgentServer
from tests.tokenizer_manager.live_server import END_ID, LiveServer
from tests.tokenizer_manager.parsed_answers import TOOLS

PATH = "/v1/chat/completions"
HERMES_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
TEXT = f"<think>\nh\u00e9\n</think>\n\nSo:\n{HERMES_CALL}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with AgentServer() as live:
        yield live


def body(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stop_token_ids": [END_ID], "tools": TOOLS, **fields}


def joined(chunks: Sequence[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client puts together from the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += (delta.model_extra or {}).get("reasoning", "")
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
            for call in delta.tool_calls or ():
                assert call.function is not None
                if call.id:
                    message["calls"][call.index] = [call.id, call.function.name, ""]
                message["calls"][call.index][2] += call.function.arguments or ""
    return message


def test_a_call_and_reasoning_as_a_whole(server: LiveServer) -> None:
    answer = ChatCompletion.model_validate(server.post(PATH, body()).json)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    assert choice.message.model_extra == {"reasoning_content": "h\u00e9", "reasoning": "h\u00e9"}
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "weather"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    tokens = len("<think>\nh\u00e9\n</think>".encode())
    assert answer.usage.completion_tokens_details.reasoning_tokens == tokens


def test_the_stream_adds_up_to_the_whole(server: LiveServer) -> None:
    whole = ChatCompletion.model_validate(server.post(PATH, body()).json)
    events = server.events(PATH, body(stream=True, stream_options={"include_usage": True}))
    chunks = [ChatCompletionChunk.model_validate(event) for event in events[:-1]]
    message, streamed = whole.choices[0].message, joined(chunks)
    assert message.tool_calls is not None
    function = message.tool_calls[0].function  # type: ignore[union-attr]
    assert streamed["content"] == message.content
    assert streamed["reasoning"] == "h\u00e9"
    assert [call[1:] for call in streamed["calls"].values()] == [[function.name, function.arguments]]
    assert streamed["finish_reason"] == "tool_calls"
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls]) > 10
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage


def test_only_one_call_where_they_may_not_be_parallel(server: LiveServer) -> None:
    calls = '<tool_call>{"name": "time"}</tool_call>' * 2
    both = server.post(PATH, body(calls)).json["choices"][0]["message"]
    assert [call["function"]["name"] for call in both["tool_calls"]] == ["time", "time"]
    assert both["content"] is None
    first = server.post(PATH, body(calls, parallel_tool_calls=False)).json["choices"][0]["message"]
    assert len(first["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_calls_are_content(server: LiveServer, fields: dict[str, Any]) -> None:
    choice = server.post(PATH, body(HERMES_CALL, **fields)).json["choices"][0]
    assert choice["message"]["content"] == HERMES_CALL
    assert choice["finish_reason"] == "stop"


def test_reasoning_can_stay_in_the_content(server: LiveServer) -> None:
    message = server.post(PATH, body("<think>a</think>b", separate_reasoning=False)).json["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"
    assert "reasoning" not in message


@pytest.mark.parametrize(("parser", "skips"), [("gpt-oss", False), ("hermes", True)])
def test_special_tokens_that_a_parser_needs_are_kept(parser: str, skips: bool) -> None:
    with LiveServer(http={"family": ChatFamily(parser, habits=TemplateHabits(takes_tools=True))}) as server:
        server.post(PATH, {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS[:1], "max_tokens": 1})
        assert [req.sampling_params.skip_special_tokens for req in server.backend.requests] == [skips]


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="a" * 1024)]}, "tools[0].function.name"),
        ({"tools": [function(), function()]}, "tools[1].function.name"),
        ({"tools": [function(name=f"f{index}") for index in range(129)]}, "tools"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": 5})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"properties": 5})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"properties": {"a": {"type": "str"}}})]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_bad_tools(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post(PATH, body(**fields))
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "5"}, "messages[0].tool_call_id"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls[0].id"),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_bad_messages(server: LiveServer, message: dict[str, Any], param: str) -> None:
    answer = server.post(PATH, {"messages": [message]})
    assert answer.status == 400
    assert answer.error["param"] == param
