"""langchain-openai: invoke, stream, a forced tool, structured output, the Responses API."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class Person(BaseModel):
    """A person."""

    name: str
    is_adult: bool


def chat(max_tokens: int = 24, **others: bool) -> ChatOpenAI:
    url = os.environ["BASE_URL"] + "/v1"
    return ChatOpenAI(model="smollm2", base_url=url, api_key="none", temperature=0, max_tokens=max_tokens, **others)


def main() -> None:
    """Talk to BASE_URL."""
    message = chat().invoke(QUESTION)
    assert "Paris" in message.text
    assert message.usage_metadata["output_tokens"] > 1
    assert "".join(chunk.text for chunk in chat().stream(QUESTION)) == message.text
    assert chat(use_responses_api=True).invoke(QUESTION).text == message.text
    called = chat(200).bind_tools([Person], tool_choice="required").invoke("Invent a person.")
    assert called.tool_calls[0]["name"] == "Person"
    Person.model_validate(called.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat(200).with_structured_output(Person, method=method).invoke("Invent one."), Person)


if __name__ == "__main__":
    main()
