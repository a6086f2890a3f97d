"""Schemas against a live server at temperature 1: `make test-grammar` asks for 200 of them, `make test` for some.

    python -m tests.grammar.battery [--schemas N] [--unique N] [--base-url URL]

Prints every answer that is not valid, and a summary; exit code 1 unless all that end with `stop` are valid and 95 % do.
Without --base-url it asks for many unique schemas too, of which the server may not keep more than 64 MiB.
"""

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jsonschema
import requests

from tests.e2e.server_process import serving
from tests.grammar.schemas import Schema, schemas
from tests.grammar.unique_schemas import MOST_KEPT_MIB, kept_of

MAX_TOKENS = 512
CONCURRENCY = 16
LEAST_STOPPED = 0.95


class Outcome(NamedTuple):
    """What became of one schema; `problem` is empty for a valid answer, or one that was cut."""

    kind: str
    finish_reason: str
    problem: str
    num_tokens: int


def problem_of(text: str, schema: Schema) -> str:
    """Why this is no JSON that the schema allows; "" where it is."""
    validator = jsonschema.Draft202012Validator
    try:
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error} in {text!r}"
    return ""


def ask(base_url: str, seed: int, kind: str, schema: Schema) -> Outcome:
    """One chat whose answer must follow the schema."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Write a {kind.replace('_', ' ')} in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": kind, "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
    }
    response = requests.post(f"{base_url}/v1/chat/completions", json=body, timeout=600)
    if not response.ok:
        return Outcome(kind, "refused", response.text, 0)
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    reason = choice["finish_reason"]
    problem = problem_of(choice["message"]["content"], schema) if reason == "stop" else ""
    return Outcome(kind, reason, problem, usage["completion_tokens"])


def run(base_url: str, num_schemas: int) -> list[Outcome]:
    """All of them, several at a time."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        jobs = [(base_url, seed, kind, schema) for seed, (kind, schema) in enumerate(schemas(num_schemas))]
        return list(pool.map(lambda job: ask(*job), jobs))


def main() -> None:
    """Run, tell the failures, and a summary."""
    parser = argparse.ArgumentParser(description="JSON Schemas against the packaged model.")
    parser.add_argument("--schemas", type=int, default=200, help="how many")
    parser.add_argument("--unique", type=int, default=5000, help="how many unique schemas")
    parser.add_argument("--base-url", help="a server that runs already")
    args = parser.parse_args()
    start, kept_mib = time.monotonic(), 0.0
    if args.base_url:
        outcomes = run(args.base_url, args.schemas)
    else:
        with serving("smollm2") as server:
            outcomes = run(server.url, args.schemas)
            kept_mib = kept_of(server, args.unique)
    for each in outcomes:
        if each.problem:
            print(f"{each.kind}: {each.finish_reason}: {each.problem}")
    counts = Counter(each.finish_reason for each in outcomes)
    tokens = sum(each.num_tokens for each in outcomes)
    print(f"{dict(counts)}, {tokens} tokens, {time.monotonic() - start:.0f} s")
    print("cut:", dict(Counter(each.kind for each in outcomes if each.finish_reason == "length")))
    print(f"kept of {args.unique} unique schemas: {kept_mib:.0f} MiB")
    is_good = not any(each.problem for each in outcomes) and counts["stop"] >= LEAST_STOPPED * len(outcomes)
    is_good = is_good and kept_mib <= MOST_KEPT_MIB
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
