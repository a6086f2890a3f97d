"""Tools and reasoning over HTTP: what is asked, what is refused, and the same answer as a whole and as a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from millstream.common.flags import ConfigError
from millstream.tokenizer_manager.chat.chat_family import ChatFamily, find_chat_family
from millstream.tokenizer_manager.chat.chat_prompt import ChatMessage, template_messages
from millstream.tokenizer_manager.chat.template_habits import TemplateHabits
from millstream.tokenizer_manager.chat.tool_format import DEEPSEEK_V31
from tests.tokenizer_manager.live_server import END, END_ID, LiveServer
from tests.tokenizer_manager.parsed_answers import TOOLS

PATH = "/v1/chat/completions"
HERMES_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
TEXT = f"<think>\nh\u00e9\n</think>\n\nSo:\n{HERMES_CALL}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


class LastMessageRenderer:
    """The prompt, and so the answer of an EchoBackend, is the last message."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        return f"{messages[-1]['content']}{END}"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    family = ChatFamily("hermes", "think", TemplateHabits(takes_tools=True, takes_tool_calls=True))
    with LiveServer(renderer=LastMessageRenderer(), http={"family": family}) as live:
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


HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "sun"}]},
]


def history() -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(HISTORY, list[ChatMessage]))


def test_messages_for_a_template_that_knows_tools() -> None:
    habits = TemplateHabits(takes_tools=True, takes_tool_calls=True, takes_developer=True)
    developer, _, assistant, tool, _ = habits.messages(history(), TOOLS)
    assert developer["role"] == "developer"
    assert assistant["content"] == ""
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Bern"}}
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_messages_for_deepseeks_template_and_that_of_gpt_oss() -> None:
    template = "{{ tools }}{{ tool_calls }}{{ tool['function']['name'] + '<\uff5ctool\u2581sep\uff5c>' }}"
    deepseek = find_chat_family({"default": template + "{{ tool['function']['arguments'] + '' }}"}, "deepseek", "none")
    assert deepseek.forced_format == DEEPSEEK_V31
    call = deepseek.habits.messages(history(), TOOLS)[2]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"city":"Bern"}'
    template = "{{ tools }}{{ tool_calls }}{{ message.thinking }}{{ arguments|tojson }}"
    assistant = find_chat_family({"default": template}, "gpt-oss", "gpt-oss").habits.messages(history(), TOOLS)[2]
    assert assistant["thinking"] == "hm"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


def test_ids_for_a_template_that_takes_short_ones() -> None:
    template = "{{ tools }}{{ tool_calls }}{% if tool_call.id|length != 9 %}"
    habits = find_chat_family({"default": template}, "mistral", "none").habits
    *_, assistant, first, second = habits.messages(history(), TOOLS)
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert ids[0] != ids[1]
    assert [len(call_id) for call_id in ids] == [9, 9]


def test_messages_for_a_template_that_knows_none() -> None:
    system, _, assistant, answers = TemplateHabits().messages(history(), TOOLS)
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name":"weather"' in system["content"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"{call}\n{call}", "reasoning_content": "hm"}
    responses = [f"<tool_response>\n{text}\n</tool_response>" for text in ("rain", "sun")]
    assert answers == {"role": "user", "content": "\n".join(responses)}


def test_arguments_that_are_no_object_stay_a_text() -> None:
    cut_off = {**CALL, "function": {"name": "weather", "arguments": '{"ci'}}
    message = msgspec.convert({"role": "assistant", "tool_calls": [cut_off]}, ChatMessage)
    assert template_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == '{"ci'


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        ("{{ messages }}", ("hermes", "none")),
        ("{{ tools }} <tool_call> {{ enable_thinking }} <think>", ("hermes", "think")),
        ("{{ tools }} [TOOL_CALLS]", ("mistral", "none")),
        ("{{ tools }} <|python_tag|>", ("llama3", "none")),
        ("{{ tools }} <\uff5ctool\u2581calls\u2581begin\uff5c> </think>", ("deepseek", "deepseek-r1")),
        ("{{ tools }} <|channel|> <|message|>", ("gpt-oss", "gpt-oss")),
        ("{{ tools }} <tool_call> <arg_key>", ("none", "none")),
        ("{{ tools }}", ("none", "none")),
    ],
)
def test_parsers_are_found_in_the_template(template: str, parsers: tuple[str, str]) -> None:
    family = find_chat_family({"default": template}, "auto", "auto")
    assert (family.tool_call_parser, family.reasoning_parser) == parsers
    named = find_chat_family({"default": template}, "qwen", "none")
    assert (named.tool_call_parser, named.reasoning_parser) == ("hermes", "none")


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, none, deepseek"):
        find_chat_family({}, "pythonic", "auto")
