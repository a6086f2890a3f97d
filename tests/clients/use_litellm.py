"""litellm: its openai and anthropic providers, streams, responses, mapped errors."""

import os

import litellm
from raised import raised

URL = os.environ["BASE_URL"]
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"messages": HELLO, "max_tokens": 24, "temperature": 0, "api_key": "none"}


def main() -> None:
    """Talk to BASE_URL."""
    text = litellm.completion(model="openai/smollm2", api_base=URL + "/v1", **ASKED).choices[0].message.content
    assert "Paris" in text
    chunks = litellm.completion(
        model="openai/smollm2", api_base=URL + "/v1", stream=True, stream_options={"include_usage": True}, **ASKED
    )
    whole = litellm.stream_chunk_builder(list(chunks), messages=HELLO)
    assert whole.choices[0].message.content == text
    message = litellm.completion(model="anthropic/smollm2", api_base=URL, **ASKED)
    assert message.choices[0].message.content == text
    response = litellm.responses(
        model="openai/smollm2",
        api_base=URL + "/v1",
        api_key="none",
        input=HELLO[0]["content"],
        max_output_tokens=24,
        temperature=0,
    )
    assert response.output[0].content[0].text == text
    asked = {**ASKED, "api_base": URL + "/v1"}
    raised(litellm.NotFoundError, litellm.completion, **{**asked, "model": "openai/gpt-9"})
    long = [{"role": "user", "content": "word " * 20000}]
    too_long = {**asked, "model": "openai/smollm2", "messages": long}
    assert "context" in str(raised(litellm.BadRequestError, litellm.completion, **too_long))


if __name__ == "__main__":
    main()
