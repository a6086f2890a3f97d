"""`millstream bench serve`: measure a running OpenAI-compatible server, ours or another."""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .api_client import NoAnswer, first_model
from .bench_client import Load, Sample, run_load


def main(argv: list[str]) -> int:
    """Run the load and print the report; 1 if any request failed, 2 for a bad command line."""
    arguments = _parse(argv)
    base_url = arguments.base_url.rstrip("/")
    try:
        load = Load(
            base_url=base_url,
            model=arguments.model or asyncio.run(first_model(base_url)),
            num_prompts=arguments.num_prompts,
            max_concurrency=min(arguments.max_concurrency, arguments.num_prompts),
            random_input_len=arguments.random_input_len,
            random_output_len=arguments.random_output_len,
            seed=arguments.seed,
            num_warmups=arguments.num_warmups,
        )
        samples, seconds = asyncio.run(run_load(load))
    except NoAnswer as error:
        print(f"millstream bench: error: {error}", file=sys.stderr)
        return 2
    report = make_report(load, samples, seconds)
    print_report(report)
    if arguments.json:
        Path(arguments.json).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 1 if report["num_errors"] else 0


def make_report(load: Load, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Throughput, TTFT, TPOT and ITL of the requests that succeeded. Times in ms, rates per second."""
    good = [sample for sample in samples if sample.error is None]
    tpot = [(each.latency - each.ttft) / (each.output_tokens - 1) for each in good if each.output_tokens > 1]
    known_cached = [each.cached_tokens for each in good if each.cached_tokens is not None]
    prompt_tokens, output_tokens = (
        sum(getattr(each, f"{kind}_tokens") for each in good) for kind in ("prompt", "output")
    )
    return {
        "load": msgspec.to_builtins(load),
        "num_requests": len(samples),
        "num_errors": len(samples) - len(good),
        "first_error": next((sample.error for sample in samples if sample.error), None),
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(known_cached) if known_cached else None,
        "output_tokens": output_tokens,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / seconds, 1),
        "ttft_ms": _spread([each.ttft for each in good]),
        "tpot_ms": _spread(tpot),
        "itl_ms": _spread([gap for each in good for gap in each.gaps]),
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    for name, value in report.items():
        if name == "load":
            continue
        if isinstance(value, dict):
            print(f"  {name:<20} mean {value['mean']:>10.2f}   p50 {value['p50']:>10.2f}   p99 {value['p99']:>10.2f}")
        elif value is not None:
            print(f"  {name:<20} {value}")


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    ordered = sorted(seconds)
    p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    values = {"mean": statistics.fmean(ordered), "p50": statistics.median(ordered), "p99": p99}
    return {name: round(1000 * value, 3) for name, value in values.items()}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="millstream bench", allow_abbrev=False)
    serve = parser.add_subparsers(required=True).add_parser(
        "serve", allow_abbrev=False, help="drive a running server and print times"
    )
    serve.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    serve.add_argument("--model", help="model name (default: the first that the server lists)")
    serve.add_argument("--num-prompts", type=_positive, default=64, help="requests to send (default: %(default)s)")
    serve.add_argument("--max-concurrency", type=_positive, default=8, help="open requests (default: %(default)s)")
    serve.add_argument(
        "--random-input-len", type=_positive, default=256, help="words in a prompt (default: %(default)s)"
    )
    serve.add_argument(
        "--random-output-len", type=_positive, default=128, help="tokens to ask for (default: %(default)s)"
    )
    serve.add_argument(
        "--num-warmups", type=int, default=1, help="requests before the clock starts (default: %(default)s)"
    )
    serve.add_argument("--seed", type=int, default=1, help="seed of the prompts (default: %(default)s)")
    serve.add_argument("--json", metavar="FILE", help="also write the report there")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
