"""`millstream top` against a live server: figures, tables, and what it may see."""

import json
import time
from typing import Any

import pytest

from millstream.tokenizer_manager.access import Access
from millstream.tokenizer_manager.commands.top_command import main
from millstream.tokenizer_manager.commands.top_figures import Look, figures, read_metrics
from millstream.tokenizer_manager.commands.top_text import table
from tests.tokenizer_manager.live_server import LiveServer

BODY = {"prompt": "abc", "max_tokens": 250, "stream": True}


def watch(server: LiveServer, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["--base-url", server.url, "--once", "--json", "--interval", "0.3", *argv]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_it_shows_requests_and_rates_while_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer() as server:
        server.backend.step_seconds = 0.02
        with server.send("POST", "/v1/completions", BODY, {"X-Request-Id": "watched"}) as connection:
            response = connection.getresponse()
            response.read(10)
            server.call(lambda: server.backend.report_load(5, output_tokens_total=70))
            shown = watch(server, capsys)
            (request,) = shown["requests"]
            assert (request["label"], request["prompt_tokens"], request["stream"]) == ("watched", 3, True)
            assert 0 < request["output_tokens"] < 250
            assert request["seconds"] > request["first_output_seconds"] > 0
            assert (shown["running"], shown["queued"], shown["kv_total_tokens"]) == (3, 2, 400)
            assert shown["itl_ms"] == pytest.approx(20, rel=2)
        while server.backend.num_running:
            time.sleep(0.01)
        shown = watch(server, capsys)
        assert shown["requests"] == []
        assert shown["ended"]["abort"] == 1
        assert shown["ttft_ms"] is None


def test_without_a_terminal_it_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer() as server:
        assert main(["--base-url", server.url, "--once", "--interval", "0.05"]) == 0
    text = capsys.readouterr().out
    assert [word for word in ("requests", "rates", "KV cache", "latency", "REQUEST", "echo") if word not in text] == []
    assert "\x1b" not in text


def test_a_key_shows_its_own_requests_and_the_admins_all(capsys: pytest.CaptureFixture[str]) -> None:
    access = Access(api_keys=["one", "two"], admin_api_key="root")
    with LiveServer(http={"access": access}) as server:
        server.backend.step_seconds = 0.02
        headers = {"Authorization": "Bearer one", "X-Request-Id": "of-one"}
        with server.send("POST", "/v1/completions", BODY, headers) as connection:
            connection.getresponse().read(10)
            assert [each["label"] for each in watch(server, capsys, "--api-key", "one")["requests"]] == ["of-one"]
            assert watch(server, capsys, "--api-key", "two")["requests"] == []
            assert [each["label"] for each in watch(server, capsys, "--api-key", "root")["requests"]] == ["of-one"]
        assert main(["--base-url", server.url, "--once"]) == 1
        assert "needs an API key" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense"])
def test_a_server_that_cannot_be_reached_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", url, "--once"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"millstream top: error: {url} cannot be reached: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "inf"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--interval", interval])
    assert caught.value.code == 2
    assert "--interval" in capsys.readouterr().err


def look(at: float, requests: list[dict[str, Any]] | None = None, **values: float) -> Look:
    return Look(at, values, {"stop": values.get("num_requests_total", 0)}, requests or [])


def test_rates_are_of_the_interval_and_nothing_is_null() -> None:
    before = look(10, output_tokens_total=100, prefix_cache_hits_total=5, prefix_cache_queries_total=50)
    now = look(
        12,
        output_tokens_total=300,
        prefix_cache_hits_total=35,
        prefix_cache_queries_total=90,
        step_time_seconds_sum=1.0,
        step_time_seconds_count=10,
    )
    shown = figures(before, now)
    assert (shown["output_tokens_per_s"], shown["hit_rate"], shown["step_ms"]) == (100.0, 0.75, 100.0)
    assert (shown["itl_ms"], shown["running"]) == (None, 0)
    restarted = figures(now, look(13, output_tokens_total=2))
    assert restarted["output_tokens_per_s"] == 0.0


def test_series_with_labels_are_added_up() -> None:
    text = '# HELP x\nmillstream_num_requests_total{model_name="m",outcome="stop"} 3.0\n'
    text += 'millstream_num_requests_total{model_name="m",outcome="abort"} 1.0\nother_total 5\n'
    assert read_metrics(text) == ({"num_requests_total": 4.0}, {"stop": 3.0, "abort": 1.0})


def test_a_table_fits_its_terminal_and_is_safe_to_print() -> None:
    request = {
        "rid": "r" * 300,
        "label": "\x1b[31mred",
        "stream": True,
        "seconds": 2.0,
        "first_output_seconds": 0.5,
        "prompt_tokens": 7,
        "output_tokens": 31,
    }
    shown = figures(look(0), look(1, [request, *[request | {"label": None}] * 40]))
    text = table("title", shown, width=80, height=20)
    lines = text.split("\n")
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    assert lines[9].split() == ["2.0", "7", "31", "500", "20.0", "?[31mred"]
    assert "retractions 0" in text
    assert lines[-1].startswith("... and ")
