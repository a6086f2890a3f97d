"""pydantic-ai: its OpenAI chat, OpenAI Responses and Anthropic models: text, streams, structured output."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of France?"
SETTINGS = {"temperature": 0, "max_tokens": 24}


class Person(BaseModel):
    name: str
    is_adult: bool


async def main() -> None:
    """Talk to BASE_URL."""
    url = os.environ["BASE_URL"]
    openai = OpenAIProvider(base_url=url + "/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=url, api_key="none")
    for model in (
        OpenAIChatModel("smollm2", provider=openai),
        OpenAIResponsesModel("smollm2", provider=openai),
        AnthropicModel("smollm2", provider=anthropic),
    ):
        await check(model)


async def check(model: Model) -> None:
    """Text, the same streamed, and a class (through a tool that must be called)."""
    text = (await Agent(model).run(QUESTION, model_settings=SETTINGS)).output
    assert "Paris" in text
    async with Agent(model).run_stream(QUESTION, model_settings=SETTINGS) as stream:
        assert await stream.get_output() == text
    agent = Agent(model, output_type=Person)
    found = await agent.run("Invent a person.", model_settings={"temperature": 0, "max_tokens": 200})
    assert isinstance(found.output, Person)


if __name__ == "__main__":
    asyncio.run(main())
