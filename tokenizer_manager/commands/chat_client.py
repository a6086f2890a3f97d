"""A client of /v1/chat/completions for a person: a conversation, and its answers as they come."""

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from .api_client import NoAnswer, error_message, headers_of

SILENT_SECONDS = 600.0  # without an event: the server is gone


class Conversation:
    """What has been said, as the API wants it."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    def messages(self, text: str) -> list[dict[str, str]]:
        """All so far, and what the user says now."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns, {"role": "user", "content": text}]

    def keep(self, text: str, answer: str) -> None:
        """Add what the user said and what came back, whole or in part."""
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


class Answer(msgspec.Struct):
    """What has come of one answer; times by time.monotonic."""

    started: float
    content: str = ""
    num_events: int = 0
    first: float = 0.0
    last: float = 0.0
    usage: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> tuple[str, str]:
        """Take an event; returns its reasoning and its content."""
        self.usage = event.get("usage") or self.usage
        delta: dict[str, Any] = event["choices"][0]["delta"] if event.get("choices") else {}
        reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
        if reasoning or content:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.num_events += 1
        self.content += content
        return reasoning, content

    @property
    def num_tokens(self) -> int:
        """By the server's count where it came, else the events."""
        return int(self.usage["completion_tokens"]) if self.usage else self.num_events

    def summary(self) -> str:
        """One line for a person."""
        if not self.first:
            return "nothing came"
        seconds = self.last - self.first
        rate = f", {(self.num_tokens - 1) / seconds:.1f} tokens/s" if self.num_tokens > 1 and seconds > 0 else ""
        prompt = ""
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            prompt = f", prompt {self.usage['prompt_tokens']} ({cached} cached)"
        return f"{self.num_tokens} tokens{rate}, first after {self.first - self.started:.2f} s{prompt}"


async def stream_answer(
    base_url: str, body: dict[str, Any], answer: Answer, api_key: str | None
) -> AsyncIterator[tuple[str, str]]:
    """Send the body and yield (reasoning, content) as they come, `answer` fills; NoAnswer with the server's error."""
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{base_url}/v1/chat/completions", json=request, headers=headers_of(api_key)) as response,
        ):
            if response.status != 200:
                raise NoAnswer(error_message(base_url, response.status, await response.read()))
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:], type=dict[str, Any])
                    if event.get("error"):
                        raise NoAnswer(str(event["error"].get("message")))
                    yield answer.add(event)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise NoAnswer(f"{base_url} cannot be reached: {why}") from error
