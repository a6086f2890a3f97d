"""The figures of `millstream top`: two looks at /metrics, and what happened between them."""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ...common.metrics import PREFIX

SERIES = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)")
OUTCOME = re.compile(r'outcome="(\w+)"')


class Look(msgspec.Struct, frozen=True):
    """What a server said at a time: sums over labels, `num_requests_total` also by outcome; its requests."""

    at: float
    values: Mapping[str, float]
    outcomes: Mapping[str, float]
    requests: list[dict[str, Any]]


def read_metrics(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """The sum of every series of ours by name, and the requests that ended by outcome."""
    values: dict[str, float] = {}
    outcomes: dict[str, float] = {}
    for line in text.splitlines():
        found = SERIES.fullmatch(line)
        if found is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        values[name] = values.get(name, 0.0) + value
        outcome = OUTCOME.search(labels)
        if name == "num_requests_total" and outcome:
            outcomes[outcome[1]] = value
    return values, outcomes


def figures(before: Look, now: Look) -> dict[str, Any]:
    """Gauges as they are; rates a second, shares and means (ms) of what happened in between, null where nothing did."""
    seconds = max(now.at - before.at, 1e-9)

    def gauge(name: str) -> int:
        return round(now.values.get(name, 0))

    def rise(name: str) -> float:
        return max(0.0, now.values.get(name, 0) - before.values.get(name, 0))

    def rate(name: str) -> float:
        return round(rise(name) / seconds, 1)

    def mean_ms(name: str) -> float | None:
        return _share(1000 * rise(f"{name}_sum"), rise(f"{name}_count"), 2)

    return {
        "seconds": round(seconds, 3),
        "running": gauge("num_running_reqs"),
        "queued": gauge("num_queue_reqs"),
        "queued_tokens": gauge("num_queue_tokens"),
        "paused": bool(gauge("is_paused")),
        "ended": {name: round(value) for name, value in now.outcomes.items()},
        "refused": gauge("num_refused_requests_total"),
        "retractions": gauge("num_retracted_requests_total"),
        "output_tokens_per_s": rate("output_tokens_total"),
        "requests_per_s": rate("num_requests_total"),
        "steps_per_s": rate("steps_total"),
        "looked_up_tokens_per_s": rate("prefix_cache_queries_total"),
        "hit_rate": _share(rise("prefix_cache_hits_total"), rise("prefix_cache_queries_total"), 4),
        "kv_used_tokens": gauge("num_used_tokens"),
        "kv_cached_tokens": gauge("num_cached_tokens"),
        "kv_total_tokens": gauge("max_total_num_tokens"),
        "kv_usage": round(now.values.get("token_usage", 0.0), 4),
        "ttft_ms": mean_ms("time_to_first_token_seconds"),
        "itl_ms": mean_ms("inter_token_latency_seconds"),
        "queue_ms": mean_ms("queue_time_seconds"),
        "step_ms": mean_ms("step_time_seconds"),
        "requests": now.requests,
    }


def _share(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole > 0 and math.isfinite(part) else None
