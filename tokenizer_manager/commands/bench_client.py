"""A load client for any OpenAI-compatible server: seeded prompts, streamed completions, times of every token."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
)
TOTAL_SECONDS = 3600


class Load(msgspec.Struct, frozen=True):
    """What to send. Lengths are in words, about a token each."""

    base_url: str
    model: str
    num_prompts: int
    max_concurrency: int
    random_input_len: int
    random_output_len: int
    seed: int
    num_warmups: int = 1


class Sample(msgspec.Struct):
    """One request as the client saw it; times in seconds."""

    start: float = 0.0  # by time.perf_counter
    ttft: float = 0.0
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # where the server tells
    gaps: list[float] = msgspec.field(default_factory=list)  # between chunks that carry text
    error: str | None = None


def make_prompts(load: Load) -> list[str]:
    """Random words, other ones for every seed and concurrency, so that no server's prefix cache can help."""
    rng = random.Random(1000 * load.seed + load.max_concurrency)  # noqa: S311 - a workload, not a secret
    count = load.num_warmups + load.num_prompts
    return [" ".join(rng.choices(WORDS, k=load.random_input_len)) for _ in range(count)]


async def run_load(load: Load, prompts: Sequence[str] | None = None) -> tuple[list[Sample], float]:
    """Send every prompt, at most `max_concurrency` at a time; returns the samples and the wall time in seconds.

    `prompts` take the place of the random ones; the first `num_warmups` of them are sent alone, before the clock starts.
    """
    prompts = make_prompts(load) if prompts is None else prompts
    async with open_session() as session:
        for prompt in prompts[: load.num_warmups]:
            await send(session, load, prompt, Sample())
        start = time.perf_counter()
        samples = await _send_all(session, load, prompts[load.num_warmups :])
        return samples, time.perf_counter() - start


def open_session() -> aiohttp.ClientSession:
    """A session that opens a connection for every request."""
    timeout = aiohttp.ClientTimeout(total=TOTAL_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def _send_all(session: aiohttp.ClientSession, load: Load, prompts: Sequence[str]) -> list[Sample]:
    waiting = iter(prompts)
    samples: list[Sample] = []

    async def work() -> None:
        for prompt in waiting:
            samples.append(Sample())
            await send(session, load, prompt, samples[-1])

    await asyncio.gather(*(work() for _ in range(load.max_concurrency)))
    return samples


async def send(session: aiohttp.ClientSession, load: Load, prompt: str, sample: Sample) -> None:
    """Stream one completion; `sample` fills while it comes."""
    sample.start = time.perf_counter()
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.random_output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(f"{load.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"status {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, sample)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"


async def _read(response: aiohttp.ClientResponse, sample: Sample) -> None:
    last = sample.start
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = msgspec.json.decode(line[6:])
        if event.get("error"):
            sample.error = str(event["error"])[:200]
        if event.get("usage"):
            _read_usage(event["usage"], sample)
        if event.get("choices") and event["choices"][0].get("text"):
            now = time.perf_counter()
            if sample.ttft:
                sample.gaps.append(now - last)
            else:
                sample.ttft = now - sample.start
            last = now
    sample.latency = last - sample.start
    if not sample.ttft and not sample.error:
        sample.error = "the stream had no text"


def _read_usage(usage: dict[str, Any], sample: Sample) -> None:
    sample.prompt_tokens = usage["prompt_tokens"]
    sample.output_tokens = usage["completion_tokens"]
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
