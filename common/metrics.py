"""The table of metrics: every series that `/metrics` shows, as data.

Names are SGLang's with our prefix, in base units; counters end in `_total`. Bucket bounds are the union of what vLLM's
and SGLang's dashboards use, and start low enough for a server that answers in milliseconds.
"""

from typing import Literal

import msgspec

PREFIX = "millstream_"
OUTCOMES = ("stop", "length", "abort", "error")
REFUSAL_CODES = ("queue_full", "queue_timeout", "request_timeout", "out_of_memory")
STATUS_CLASSES = ("2xx", "4xx", "5xx")

# fmt: off
TTFT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8,
                1, 2, 2.5, 4, 5, 6, 7.5, 8, 10, 20, 40, 60, 80, 100, 160, 200, 400, 640, 2560)
ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.075, 0.08,
               0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8, 1, 2, 2.5, 4, 5, 6, 7.5, 8, 10, 20, 40, 80)
E2E_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 2.5, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50,
               60, 80, 100, 120, 200, 240, 400, 480, 600, 960, 1200, 1800, 1920, 2400, 7680)
QUEUE_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 60, 120, 300, 600,
                 1200, 3000)
STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6,
                12, 30, 60)
GRAMMAR_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
# fmt: on


class Metric(msgspec.Struct, frozen=True):
    """One family; its labels are those beside `model_name`, with the values that are known from the start."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    label_values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label -> values."""
        return dict(self.label_values)

    @property
    def full_name(self) -> str:
        """The name that Prometheus sees."""
        return PREFIX + self.name


METRICS = (
    Metric("gauge", "num_running_reqs", "Requests in the running batch."),
    Metric("gauge", "num_queue_reqs", "Requests in the waiting queue."),
    Metric("gauge", "num_grammar_queue_reqs", "Requests that wait until their grammar is compiled."),
    Metric("gauge", "num_queue_tokens", "Known tokens of the requests in the waiting queue."),
    Metric("gauge", "num_open_reqs", "HTTP requests for work that have not been answered to their end."),
    Metric("gauge", "num_used_tokens", "KV cache slots that running requests hold."),
    Metric("gauge", "num_cached_tokens", "KV cache slots of cached prefixes that can be evicted."),
    Metric("gauge", "max_total_num_tokens", "KV cache slots in all."),
    Metric("gauge", "token_usage", "Share of the KV cache that running requests hold, from 0 to 1."),
    Metric("gauge", "new_token_ratio", "Share of a request's output budget that admission reserves."),
    Metric("gauge", "chunk_tokens", "Prompt tokens that one step may compute now."),
    Metric("gauge", "is_paused", "1 while generation is paused, else 0."),
    Metric("counter", "steps_total", "Steps whose results are back."),
    Metric("counter", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    Metric("counter", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    Metric("counter", "prompt_tokens_total", "Prompt tokens of requests that ended."),
    Metric("counter", "output_tokens_total", "Output tokens, counted as they are sampled."),
    Metric("counter", "generation_tokens_total", "Output tokens of requests that ended."),
    Metric("counter", "cached_tokens_total", "Prompt tokens of requests that ended which came from the prefix cache."),
    Metric("counter", "num_requests_total", "Requests that ended, by outcome.", (("outcome", OUTCOMES),)),
    Metric("counter", "num_aborted_requests_total", "Requests ended by their client or by /abort_request."),
    Metric("counter", "num_retracted_requests_total", "Times that a running request was put back into the queue."),
    Metric("counter", "num_preempted_requests_total", "Times that a running request made room for a more urgent one."),
    Metric("counter", "num_backfilled_requests_total", "Times that a request passed one that did not fit yet."),
    Metric(
        "counter",
        "num_refused_requests_total",
        "Requests that found no place or ran out of time, by the code of their error.",
        (("code", REFUSAL_CODES),),
    ),
    Metric("counter", "num_grammar_total", "Requests that follow a grammar."),
    Metric("counter", "num_grammar_timeout_total", "Grammars that were not compiled in time, in either place."),
    Metric("counter", "broken_invariants_total", "Faults that the scheduler found in its own state, and mended."),
    Metric("counter", "dropped_frames_total", "Frames between processes that were dropped because they were not ours."),
    Metric("counter", "slow_clients_total", "Answers cut because the client hardly read."),
    Metric("counter", "http_requests_total", "HTTP requests, by route.", (("route", ()),)),
    Metric(
        "counter",
        "http_responses_total",
        "HTTP responses, by route and class of status.",
        (("route", ()), ("status", STATUS_CLASSES)),
    ),
    Metric(
        "histogram",
        "time_to_first_token_seconds",
        "From the arrival of a streamed request to its first output.",
        buckets=TTFT_BUCKETS,
    ),
    Metric(
        "histogram",
        "inter_token_latency_seconds",
        "Between output tokens of streamed requests; an output of k tokens counts k times.",
        buckets=ITL_BUCKETS,
    ),
    Metric(
        "histogram", "e2e_request_latency_seconds", "From the arrival of a request to its end.", buckets=E2E_BUCKETS
    ),
    Metric(
        "histogram",
        "queue_time_seconds",
        "From the arrival of a request to the first step that computed it.",
        buckets=QUEUE_BUCKETS,
    ),
    Metric(
        "histogram",
        "grammar_compilation_time_seconds",
        "Time in which a new grammar was compiled, or refused.",
        buckets=GRAMMAR_BUCKETS,
    ),
    Metric("histogram", "step_time_seconds", "Time of one step in the workers.", buckets=STEP_BUCKETS),
)
