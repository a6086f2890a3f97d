"""The loads that serving.py measures with, and one measurement of each kind."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from millstream.tokenizer_manager.commands.bench_client import Load, Sample, open_session, run_load, send
from millstream.tokenizer_manager.commands.bench_command import make_report
from tests.bench.serving_prompts import PromptMaker
from tests.bench.serving_servers import RunningServer, Slots

MODEL = "smollm2"
COLD = {"random", "long"}  # no prompt token may come out of a cache
WARM_UP_OUTPUT_LEN = 16
SHARED_LEN = 1024
LONG_LEN, LONG_OUTPUT_LEN = 4096, 16
SETTLED_TOKENS = 64  # of every stream before the long prompt arrives
POLL_SECONDS = 0.002
MANY_SLOTS, LONG_SLOTS = Slots(32, 1280), Slots(9, LONG_LEN + 512)


class Workload(NamedTuple):
    """`num_prompts` requests, `concurrency` at a time; lengths in tokens."""

    name: str  # random, warm, shared or long
    concurrency: int
    num_prompts: int
    prompt_len: int
    output_len: int
    shared_len: int = 0  # of the prompt, and cached before the clock starts
    slots: Slots = MANY_SLOTS


def workloads(names: Sequence[str], concurrencies: Sequence[int], scale: float) -> list[Workload]:
    """What `--workloads` asks for; `scale` makes the number of prompts smaller."""
    num_prompts = {1: 6, 8: 16}
    counts = {each: max(each, round(scale * num_prompts.get(each, 2 * each))) for each in concurrencies}
    known = {
        "random": [Workload("random", each, count, 256, 128) for each, count in counts.items()],
        "warm": [Workload("warm", 8, max(8, round(scale * 16)), 256, 128)],
        "shared": [Workload("shared", 8, max(8, round(scale * 32)), SHARED_LEN + 64, 64, SHARED_LEN)],
        "long": [Workload("long", 8, 8, 256, 512, slots=LONG_SLOTS)],
    }
    return [workload for name in names for workload in known[name]]


def make_prompts(workload: Workload, maker: PromptMaker) -> list[str]:
    """The prompt that is sent before the clock starts, then the others; the long one is the last."""
    count = 1 + workload.num_prompts
    if workload.shared_len:
        prefix = maker.make(workload.shared_len)
        return [maker.make(workload.prompt_len - workload.shared_len, prefix) for _ in range(count)]
    prompts = [maker.make(workload.prompt_len) for _ in range(count)]
    return [*prompts, maker.make(LONG_LEN)] if workload.name == "long" else prompts


def measure(server: RunningServer, workload: Workload, prompts: Sequence[str]) -> dict[str, Any]:
    """One run of the workload: its JSON line."""
    load = _load(server, workload)
    asyncio.run(run_load(msgspec.structs.replace(load, random_output_len=WARM_UP_OUTPUT_LEN), prompts[:1]))
    if workload.name == "warm":
        asyncio.run(run_load(load, prompts[1:]))
    before, own_cpu = server.cpu_seconds(), time.process_time()
    samples, seconds, beside = asyncio.run(_run(load, workload, prompts[1:]))
    own_cpu = time.process_time() - own_cpu
    after = server.cpu_seconds()
    report = make_report(load, samples, seconds)
    del report["load"]
    lens = [sample.prompt_tokens for sample in samples if not sample.error]
    return {
        "server": server.name,
        "workload": workload.name,
        "concurrency": workload.concurrency,
        "wanted_prompt_tokens": workload.prompt_len,
        "prompt_tokens_off_by": max((abs(each - workload.prompt_len) for each in lens), default=None),
        **report,
        **beside,
        "client_cpu_share": round(own_cpu / seconds, 3),
        "server_cpu_seconds": {name: round(after[name] - before.get(name, 0.0), 2) for name in after},
    }


async def _run(load: Load, workload: Workload, prompts: Sequence[str]) -> tuple[list[Sample], float, dict[str, Any]]:
    if workload.name == "long":
        return await run_beside_long(load, prompts)
    return *await run_load(load, prompts), {}


async def run_beside_long(load: Load, prompts: Sequence[str]) -> tuple[list[Sample], float, dict[str, Any]]:
    """Streams that run, and the long prompt (the last) when all of them have settled."""
    streams, long = [Sample() for _ in prompts[:-1]], Sample()
    start = time.perf_counter()
    async with open_session() as session:
        tasks = [
            asyncio.create_task(send(session, load, prompt, sample))
            for prompt, sample in zip(prompts, streams, strict=False)
        ]
        while any(len(each.gaps) < SETTLED_TOKENS and not each.error for each in streams):  # noqa: ASYNC110 - they fill
            await asyncio.sleep(POLL_SECONDS)
        await send(session, msgspec.structs.replace(load, random_output_len=LONG_OUTPUT_LEN), prompts[-1], long)
        await asyncio.gather(*tasks)
    return streams, time.perf_counter() - start, beside_long(streams, long)


def beside_long(streams: Sequence[Sample], long: Sample) -> dict[str, Any]:
    """The streams' inter-token latencies while the long prompt is computed, beside their usual ones in the same run.

    Usual are those of full batches, before the long prompt arrives and after its last token.
    """
    first, end = long.start + long.ttft, long.start + long.latency
    full_from, full_until = max(s.start + s.ttft for s in streams), min(s.start + s.latency for s in streams)
    usual: list[float] = []
    during: list[float] = []
    for before, after in itertools.chain.from_iterable(map(_token_times, streams)):
        if after > long.start and before < first:
            during.append(after - before)
        elif before >= full_from and after <= full_until and (after <= long.start or before >= end):
            usual.append(after - before)
    figures: dict[str, Any] = {
        "long_ttft_ms": round(1000 * long.ttft, 1),
        "long_prompt_tokens": long.prompt_tokens,
        "long_cached_tokens": long.cached_tokens,
        "long_error": long.error or (None if full_until > first else "the streams ended before the long prompt did"),
        "num_usual": len(usual),
        "num_during": len(during),
    }
    if usual and during:
        spreads = {"usual_itl_ms": _p50_p99_ms(usual), "during_itl_ms": _p50_p99_ms(during)}
        figures |= spreads | {
            "during_p99_to_usual_p99": round(spreads["during_itl_ms"]["p99"] / spreads["usual_itl_ms"]["p99"], 2),
            "during_p99_to_usual_p50": round(spreads["during_itl_ms"]["p99"] / spreads["usual_itl_ms"]["p50"], 2),
        }
    return figures


def _load(server: RunningServer, workload: Workload) -> Load:
    return Load(
        base_url=server.url,
        model=MODEL,
        num_prompts=workload.num_prompts,
        max_concurrency=workload.concurrency,
        random_input_len=workload.prompt_len,
        random_output_len=workload.output_len,
        seed=0,
        num_warmups=0,
    )


def _token_times(sample: Sample) -> Iterator[tuple[float, float]]:
    """When a text came, and when the next one did."""
    times = itertools.accumulate(sample.gaps, initial=sample.start + sample.ttft)
    return itertools.pairwise(times)


def _p50_p99_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    return {"p50": round(1000 * statistics.median(ordered), 2), "p99": round(1000 * p99, 2)}
