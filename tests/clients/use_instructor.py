"""instructor: a class through tools and through a JSON schema, and partial objects from a stream."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    is_adult: bool


def main() -> None:
    """Talk to BASE_URL."""
    messages = [{"role": "user", "content": "Invent a person."}]
    asked = {"model": "smollm2", "messages": messages, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    plain = OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        assert isinstance(client.chat.completions.create(response_model=Person, **asked), Person)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(response_model=Person, **asked)
    Person.model_validate(last.model_dump())


if __name__ == "__main__":
    main()
