"""The one Prometheus registry: made from the table in common/metrics.py, fed by the tokenizer manager alone."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from ..common.messages import LoadSnapshot
from ..common.metrics import METRICS, Metric
from .histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All series, present at 0 from the start."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for every first one, that no dashboard reads
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._families = {metric: self._new_family(metric) for metric in METRICS if metric.kind != "histogram"}
        self._series: dict[tuple[str, ...], Any] = {
            (metric.name,): self._new_histogram(metric) for metric in METRICS if metric.kind == "histogram"
        }
        self._totals: dict[str, int] = {}
        self._add_series({})

    def add_routes(self, routes: Sequence[str]) -> None:
        """Make the series of these HTTP routes."""
        self._add_series({"route": tuple(routes)})

    def inc(self, name: str, *labels: str, by: float = 1) -> None:
        """Raise a counter; `labels` are its values beside the model's name, in the table's order."""
        self._series[name, *labels].inc(by)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._series[name,].set(value)

    def observe(self, name: str, seconds: float, weight: int = 1) -> None:
        """Count an observation in a histogram `weight` times."""
        self._series[name,].observe(seconds, weight)

    def render(self) -> bytes:
        """The text that Prometheus scrapes (of type CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def on_load(self, load: LoadSnapshot) -> None:
        """Take over the scheduler's gauges, totals and observations."""
        self.set("num_running_reqs", load.num_running_reqs)
        self.set("num_queue_reqs", load.num_queue_reqs)
        self.set("num_queue_tokens", load.num_queue_tokens)
        self.set("num_used_tokens", load.num_used_tokens)
        self.set("num_cached_tokens", load.num_cached_tokens)
        self.set("max_total_num_tokens", load.max_total_num_tokens)
        self.set("token_usage", load.num_used_tokens / max(load.max_total_num_tokens, 1))
        self.set("new_token_ratio", load.new_token_ratio)
        self.set("chunk_tokens", load.chunk_tokens)
        self.set("is_paused", load.is_paused)
        self.set("num_grammar_queue_reqs", load.num_grammar_queue_reqs)
        self._raise_to("num_grammar_total", "scheduler", load.grammar_reqs_total)
        self._raise_to("num_grammar_timeout_total", "scheduler", load.grammar_timeouts_total)
        self._raise_to("steps_total", "scheduler", load.steps)
        self._raise_to("output_tokens_total", "scheduler", load.output_tokens_total)
        self._raise_to("prefix_cache_queries_total", "scheduler", load.cache_query_tokens_total)
        self._raise_to("prefix_cache_hits_total", "scheduler", load.cache_hit_tokens_total)
        self._raise_to("num_retracted_requests_total", "scheduler", load.retractions_total)
        self._raise_to("num_preempted_requests_total", "scheduler", load.preemptions_total)
        self._raise_to("num_backfilled_requests_total", "scheduler", load.backfills_total)
        self._raise_to("broken_invariants_total", "scheduler", load.broken_invariants_total)
        self.count_dropped_frames("scheduler", load.dropped_frames_total)
        for seconds in load.step_seconds:
            self.observe("step_time_seconds", seconds)
        for seconds in load.queue_seconds:
            self.observe("queue_time_seconds", seconds)

    def count_dropped_frames(self, process: str, total: int) -> None:
        """Take over a process's count of dropped frames since boot."""
        self._raise_to("dropped_frames_total", process, total)

    def _raise_to(self, name: str, source: str, total: int) -> None:
        """Raise a counter by what `source` has counted since it was last heard; totals never fall."""
        key = f"{name}/{source}"
        before = self._totals.get(key, 0)
        if total > before:
            self.inc(name, by=total - before)
            self._totals[key] = total

    def _new_family(self, metric: Metric) -> Counter | Gauge:
        names = ["model_name", *metric.labels]
        if metric.kind == "counter":
            return Counter(metric.full_name, metric.help, names, registry=self._registry)
        return Gauge(metric.full_name, metric.help, names, registry=self._registry)

    def _new_histogram(self, metric: Metric) -> Histogram:
        histogram = Histogram(metric.full_name, metric.help, ("model_name", self._model_name), metric.buckets)
        self._registry.register(histogram)
        return histogram

    def _add_series(self, more_values: Mapping[str, tuple[str, ...]]) -> None:
        """Make every series whose label values are known, each at 0."""
        for metric, family in self._families.items():
            known = [more_values.get(label, values) for label, values in metric.labels.items()]
            for values in product(*known):
                self._series[metric.name, *values] = family.labels(self._model_name, *values)
