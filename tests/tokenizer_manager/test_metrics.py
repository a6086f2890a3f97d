"""/metrics: every series from the start, right after a request, and clean for promtool."""

import subprocess
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millstream.common.metrics import METRICS, OUTCOMES
from tests.tokenizer_manager.live_server import LiveServer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def test_every_series_is_there_at_0_from_the_start(server: LiveServer) -> None:
    text = server.request("GET", "/metrics").body.decode()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("route") != "/metrics"
    }
    names = {key[0] for key in values}
    for metric in METRICS:
        wanted = f"{metric.full_name}_count" if metric.kind == "histogram" else metric.full_name
        assert wanted in names
    assert set(values.values()) == {0.0}
    for outcome in OUTCOMES:
        assert server.metric("num_requests_total", outcome=outcome) == 0
    assert server.metric("http_responses_total", route=CHAT, status="5xx") == 0


def test_a_streamed_request_is_counted(server: LiveServer) -> None:
    server.backend.num_cached = 5
    server.events(CHAT, {"messages": HELLO, "max_tokens": 4, "stream": True})
    assert server.metric("num_requests_total", outcome="length") == 1
    assert server.metric("prompt_tokens_total") == 7
    assert server.metric("generation_tokens_total") == 4
    assert server.metric("cached_tokens_total") == 5
    assert server.metric("time_to_first_token_seconds_count") == 1
    assert server.metric("inter_token_latency_seconds_count") == 3
    assert server.metric("e2e_request_latency_seconds_count") == 1
    assert server.metric("http_requests_total", route=CHAT) == 1
    assert server.metric("http_responses_total", route=CHAT, status="2xx") == 1
    assert server.metric("num_open_reqs") == 0


def test_the_inter_token_latency_counts_every_token_of_an_output(server: LiveServer) -> None:
    server.backend.tokens_per_step = 3
    server.events(CHAT, {"messages": HELLO, "max_tokens": 9, "stream": True})
    assert server.metric("inter_token_latency_seconds_count") == 6


def test_the_latencies_of_one_stream_add_up_to_its_whole_time(server: LiveServer) -> None:
    server.backend.step_seconds = 0.01
    server.events(CHAT, {"messages": HELLO, "max_tokens": 5, "stream": True})
    parts = ("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum")
    whole = server.metric("e2e_request_latency_seconds_sum")
    assert sum(server.metric(name) for name in parts) == pytest.approx(whole, rel=0.4)


def test_every_outcome_has_its_counter(server: LiveServer) -> None:
    server.post(CHAT, {"messages": HELLO, "stop": "h"})
    server.backend.fail_after = 2
    server.post(CHAT, {"messages": HELLO})
    server.backend.fail_after = None
    server.backend.paused = True
    server.send("POST", CHAT, {"messages": HELLO}).close()
    server.until(lambda: len(server.backend.requests) == 3 and server.manager.num_inflight == 0)
    found = {outcome: server.metric("num_requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert found == {"stop": 1, "length": 0, "abort": 1, "error": 1}
    assert server.metric("num_aborted_requests_total") == 1
    server.until(lambda: server.manager.num_open == 0)
    assert server.metric("http_responses_total", route=CHAT, status="4xx") == 1
    assert server.metric("http_responses_total", route=CHAT, status="5xx") == 1


def test_the_schedulers_figures_are_taken_over(server: LiveServer) -> None:
    server.call(lambda: server.backend.report_load(5, hits=10, retractions=1))
    server.call(lambda: server.backend.report_load(9, hits=30, retractions=1))
    assert server.metric("num_running_reqs") == 3
    assert server.metric("num_queue_reqs") == 2
    assert server.metric("token_usage") == 0.25
    assert server.metric("steps_total") == 9
    assert server.metric("prefix_cache_queries_total") == 300
    assert server.metric("prefix_cache_hits_total") == 30
    assert server.metric("num_retracted_requests_total") == 1
    assert server.metric("step_time_seconds_count") == 4
    assert server.metric("queue_time_seconds_count") == 2


def test_the_schedulers_newer_figures_are_taken_over_too(server: LiveServer) -> None:
    for count in (2, 5):
        server.call(
            lambda count=count: server.backend.report_load(
                count,
                num_queue_tokens=77,
                chunk_tokens=512,
                is_paused=count == 5,
                preemptions_total=count,
                backfills_total=2 * count,
                broken_invariants_total=3 * count,
            )
        )
    assert server.metric("num_queue_tokens") == 77
    assert server.metric("chunk_tokens") == 512
    assert server.metric("is_paused") == 1
    assert server.metric("num_preempted_requests_total") == 5
    assert server.metric("num_backfilled_requests_total") == 10
    assert server.metric("broken_invariants_total") == 15


def test_routes_that_are_not_there_share_one_label(server: LiveServer) -> None:
    for path in ("/nope", "/nope/2"):
        server.request("GET", path)
    assert server.metric("http_requests_total", route="unknown") == 2


def test_promtool_has_nothing_to_say(server: LiveServer, system_tool: Callable[[str, str], str]) -> None:
    promtool = system_tool("promtool", "apt-get install prometheus")
    server.events(CHAT, {"messages": HELLO, "max_tokens": 4, "stream": True})
    text = server.request("GET", "/metrics").body
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
