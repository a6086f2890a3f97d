"""openai-python: chats, streams and their helper, parse, tools, responses, embeddings, errors, retries after 429."""

import concurrent.futures
import json
import os
import urllib.request

import openai
from openai import OpenAI
from pydantic import BaseModel
from raised import raised

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": WEATHER}}


class Person(BaseModel):
    name: str
    is_adult: bool


def main() -> None:
    """Talk to BASE_URL, and to BUSY_URL, whose queue has one place."""
    with OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none") as client:
        assert MODEL in [model.id for model in client.models.list()]
        check_chat(client)
        check_parse(client)
        check_tools(client)
        check_responses(client)
        check_errors(client)
    check_retries(os.environ["BUSY_URL"])


def check_chat(client: OpenAI) -> None:
    """A whole answer, its chunks, and what the helper makes of them are one text."""
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert "Paris" in text
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == text
    completion = client.completions.create(model=MODEL, prompt=["1, 2, 3,", "a, b, c,"], max_tokens=4)
    assert [choice.index for choice in completion.choices] == [0, 1]


def check_parse(client: OpenAI) -> None:
    """A class as the response format."""
    messages = [{"role": "user", "content": "Invent a person."}]
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    answer = client.responses.parse(model=MODEL, input="Invent a person.", text_format=Person, max_output_tokens=200)
    assert isinstance(answer.output_parsed, Person)


def check_tools(client: OpenAI) -> None:
    """A call that must come is valid, whole and streamed; its result can be sent back."""
    asked = {"model": MODEL, "tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 100, "temperature": 0}
    message = client.chat.completions.create(messages=HELLO, tool_choice="required", **asked).choices[0].message
    (call,) = message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    with client.chat.completions.stream(messages=HELLO, tool_choice="required", **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = [*HELLO, message.to_dict(), result]
    assert client.chat.completions.create(messages=again, tool_choice="none", **asked).choices[0].message.content


def check_responses(client: OpenAI) -> None:
    """A response, its stream, and a function call in it."""
    asked = {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 24, "temperature": 0}
    text = client.responses.create(**asked).output_text
    assert "Paris" in text
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == text
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(
        model=MODEL,
        input=asked["input"],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in {"Paris", "Rome"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": asked["input"]}, *called.output, output]
    assert client.responses.create(model=MODEL, input=history, max_output_tokens=16).output_text


def check_errors(client: OpenAI) -> None:
    """Errors are of the right class, and say what is wrong."""
    ask = client.chat.completions.create
    assert raised(openai.NotFoundError, ask, model="gpt-9", messages=HELLO).code == "model_not_found"
    wrong = raised(openai.BadRequestError, ask, model=MODEL, messages=HELLO, temperature=-1)
    assert wrong.param == "temperature"


def check_retries(url: str) -> None:
    """More calls than have place: some are refused with 429, and all are answered in the end."""

    def call(_: int) -> str:
        with OpenAI(base_url=url + "/v1", api_key="none", max_retries=20) as client:
            answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
            return str(answer.choices[0].finish_reason)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert set(pool.map(call, range(6))) == {"length"}
    with urllib.request.urlopen(url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    refused = [line for line in lines if line.startswith("millstream_num_refused_requests_total") and "queue" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in refused) > 0, refused


if __name__ == "__main__":
    main()
