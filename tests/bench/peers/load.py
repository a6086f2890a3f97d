"""Drives any OpenAI-compatible /v1/completions server with seeded random-word prompts and prints one JSON line.

Output tokens are counted from the usage chunk, so a server that sends several tokens a chunk is counted right.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from typing import Any

import aiohttp

WORDS = [
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
]


def make_prompt(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def send(session: aiohttp.ClientSession, args: argparse.Namespace, text: str) -> dict[str, Any]:
    body = {
        "model": args.model,
        "prompt": text,
        "max_tokens": args.output_len,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    times = [time.perf_counter()]
    usage: dict[str, Any] = {}
    async with session.post(args.base_url + "/v1/completions", json=body) as response:
        if response.status != 200:
            return {"error": f"{response.status} {(await response.text())[:200]}"}
        async for raw in response.content:
            if not raw.startswith(b"data: ") or raw.startswith(b"data: [DONE]"):
                continue
            event = json.loads(raw[6:])
            usage = event.get("usage") or usage
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter())
    if len(times) == 1:
        return {"error": "no text in the stream"}
    num_tokens = usage.get("completion_tokens", len(times) - 1)
    return {
        "ttft": times[1] - times[0],
        "tokens": num_tokens,
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "tpot": (times[-1] - times[1]) / max(num_tokens - 1, 1),
        "gaps": [after - before for before, after in itertools.pairwise(times)],
    }


async def drive(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1000 * args.seed + args.concurrency)  # no prompt returns at another concurrency or round
    shared = make_prompt(rng, args.shared_prefix_len) + " " if args.shared_prefix_len else ""
    texts = [shared + make_prompt(rng, args.input_len) for _ in range(args.num_prompts + args.warmup)]
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200), connector=connector) as session:
        for text in texts[: args.warmup]:
            await send(session, args, text)
        waiting = iter(texts[args.warmup :])
        results: list[dict[str, Any]] = []

        async def work() -> None:
            for text in waiting:
                results.append(await send(session, args, text))  # noqa: PERF401 - results of all workers, as they come

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(args.concurrency)))
        return summarize(args, results, time.perf_counter() - start)


def summarize(args: argparse.Namespace, results: list[dict[str, Any]], wall: float) -> dict[str, Any]:
    good = [result for result in results if "error" not in result]
    gaps = sorted(gap for result in good for gap in result["gaps"])

    def median_ms(key: str) -> float | None:
        return round(1000 * statistics.median(result[key] for result in good), 2) if good else None

    return {
        "concurrency": args.concurrency,
        "requests": len(results),
        "errors": len(results) - len(good),
        "first_error": next((result["error"] for result in results if "error" in result), None),
        "wall_s": round(wall, 2),
        "cached_prompt_tokens": sum(result["cached"] for result in good),
        "output_tok_s": round(sum(result["tokens"] for result in good) / wall, 1),
        "ttft_ms_p50": median_ms("ttft"),
        "tpot_ms_p50": median_ms("tpot"),
        "itl_ms_p99": round(1000 * gaps[int(0.99 * len(gaps))], 2) if gaps else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=256, help="words, about tokens each")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--shared-prefix-len", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2)
    print(json.dumps(asyncio.run(drive(parser.parse_args()))))


if __name__ == "__main__":
    main()
