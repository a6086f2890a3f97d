"""Tool calls of the packaged model, which by itself makes none: forced by a grammar, valid, and read back."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.server_process import ServerProcess

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": PARAMETERS}}
    for name in ("weather", "pollen")
]
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Bern?"}]


@pytest.fixture(scope="module")
def client(default_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none") as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pollen"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=256,
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert not answer.message.content
        assert answer.message.tool_calls
        (call,) = answer.message.tool_calls
        assert call.type == "function"
        assert call.function.name in (["weather", "pollen"] if choice == "required" else ["pollen"])
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_forced_calls_may_be_several(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=1, max_tokens=128
    ).choices[0]
    calls = list(answer.message.tool_calls or ())
    assert calls
    if answer.finish_reason == "length":  # the last one is cut off
        calls.pop()
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_with_a_response_format_an_answer_is_json_or_a_call(client: openai.OpenAI) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            tools=TOOLS,
            response_format=response_format,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=256,
        ).choices[0]
        texts = [call.function.arguments for call in answer.message.tool_calls or () if call.type == "function"]
        assert answer.finish_reason == ("tool_calls" if texts else "stop")
        for text in texts or [answer.message.content or ""]:
            jsonschema.validate(json.loads(text), PARAMETERS)


def test_calls_of_its_own_choice_obey_where_tools_are_strict(client: openai.OpenAI) -> None:
    """Earlier calls in the chat have the model make some; by itself it spoils four of five."""
    messages: list[Any] = []
    for city in ("Rome", "Paris", "Oslo"):
        function = {"name": "weather", "arguments": json.dumps({"city": city, "unit": "C"})}
        messages += [
            {"role": "user", "content": f"How is the weather in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": city, "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    tools: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    answer = client.chat.completions.create(
        model="smollm2", messages=[*messages, *MESSAGES], tools=tools, n=16, seed=3, max_tokens=64
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert calls
    for choice in answer.choices:
        if choice.finish_reason != "length":
            for call in choice.message.tool_calls or ():
                assert call.type == "function"
                jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_a_forced_call_streams_and_goes_on(client: openai.OpenAI) -> None:
    """The stream helper adds it up to the whole answer; the tool's answer is taken."""
    given: Any = {"model": "smollm2", "tools": TOOLS, "tool_choice": "required", "seed": 5, "temperature": 0}
    given |= {"parallel_tool_calls": False, "max_tokens": 256}
    whole = client.chat.completions.create(messages=MESSAGES, **given).choices[0].message
    with client.chat.completions.stream(messages=MESSAGES, **given) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.tool_calls
    assert streamed.tool_calls
    (call,), (same,) = whole.tool_calls, streamed.tool_calls
    assert call.type == same.type == "function"
    assert call.function.arguments == same.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    messages = [*MESSAGES, whole.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, tools=TOOLS, temperature=0, max_tokens=8
    )
    assert answer.choices[0].message.content
