"""anthropic-python: messages, their stream helper, tools, count_tokens, errors."""

import os

import anthropic
from anthropic import Anthropic
from raised import raised

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "weather",
    "description": "the weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}


def main() -> None:
    """Talk to BASE_URL."""
    with Anthropic(base_url=os.environ["BASE_URL"], api_key="none") as client:
        check_messages(client)
        check_tools(client)
        check_errors(client)


def check_messages(client: Anthropic) -> None:
    """A message, its stream, and its tokens."""
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 24, **GREEDY}
    message = client.messages.create(**asked)
    assert "Paris" in message.content[0].text
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().stop_reason == message.stop_reason
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def check_tools(client: Anthropic) -> None:
    """A call that must come, its stream, and its result."""
    asked = {"model": MODEL, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    message = client.messages.create(
        messages=HELLO, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked
    )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert call.input["city"] in {"Paris", "Rome"}
    with client.messages.stream(messages=HELLO, tool_choice={"type": "tool", "name": "weather"}, **asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    again = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=again, tool_choice={"type": "none"}, **asked).content[0].text


def check_errors(client: Anthropic) -> None:
    """Errors are of the right class."""
    wrong = raised(anthropic.NotFoundError, client.messages.create, model="claude", messages=HELLO, max_tokens=1)
    assert wrong.body["error"]["type"] == "not_found_error"
    assert wrong.request_id


if __name__ == "__main__":
    main()
