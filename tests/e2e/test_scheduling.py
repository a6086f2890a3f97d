"""The scheduler's promises over real processes and sockets, with the fake worker in the rank's place."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server_process import ServerProcess, millstream, serving, wait_until

SLOW_WORKER = ("-m", "tests.e2e.fake_server", "slow")
FAKE_WORKER = ("-m", "tests.e2e.fake_server")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One request runs at a time, and two may wait."""
    flags = ("--max-running-requests", "1", "--max-queued-requests", "2", "--enable-priority-scheduling")
    with serving("smollm2", *flags, program=SLOW_WORKER) as server:
        yield server


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def generate(server: ServerProcess, text: str, num_tokens: int, **fields: Any) -> requests.Response:
    params = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    headers = fields.pop("headers", {})
    body = {"text": text, "sampling_params": params, **fields}
    return server.post("/generate", body, headers=headers)


def running(server: ServerProcess) -> float:
    return server.metric("millstream_num_running_reqs")


def queued(server: ServerProcess) -> float:
    return server.metric("millstream_num_queue_reqs")


def occupy(server: ServerProcess, threads: ThreadPoolExecutor, **fields: Any) -> "Future[requests.Response]":
    """One request that runs for about two seconds."""
    wait_until(lambda: running(server) == 0, 20, "nothing runs")
    future = threads.submit(generate, server, "The first of all", 60, **fields)
    wait_until(lambda: running(server) == 1, 20, "the request runs")
    return future


def error_of(response: requests.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


def test_a_full_queue_answers_429_with_retry_after_and_serves_what_it_took(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    first = occupy(server, threads)
    waiting = [threads.submit(generate, server, f"Number {index}", 2) for index in range(2)]
    wait_until(lambda: queued(server) == 2, 20, "two requests wait")
    refused = [generate(server, "One too many", 2) for _ in range(3)]
    for response in refused:
        assert response.status_code == 429
        assert error_of(response)["code"] == "queue_full"
        assert 1 <= int(response.headers["Retry-After"]) <= 30
    assert first.result().status_code == 200
    assert [each.result().status_code for each in waiting] == [200, 200]
    assert generate(server, "There is room again", 2).status_code == 200


def test_time_limits_end_a_request_that_waits_or_runs_for_too_long(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    first = occupy(server, threads)
    late = generate(server, "I can't wait", 2, headers={"X-Request-Waiting-Timeout-S": "0.3"})
    assert (late.status_code, error_of(late)["code"]) == (503, "queue_timeout")
    assert first.result().status_code == 200
    slow = generate(server, "I take too long", 60, headers={"X-Request-Timeout-S": "0.5"})
    assert (slow.status_code, error_of(slow)["code"]) == (504, "request_timeout")
    wait_until(lambda: running(server) + queued(server) == 0, 10, "nothing is left")
    assert server.post("/flush_cache", {}).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_with_the_same_text(
    mode: str, server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    alone = generate(server, "The first of all", 60).json()
    first = occupy(server, threads)
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    time.sleep(0.3)  # until the last snapshot is here
    steps = server.metric("millstream_steps_total")
    late = threads.submit(generate, server, "I wait until it goes on", 2)
    time.sleep(0.5)
    assert server.metric("millstream_steps_total") == steps
    assert not first.done()
    flush = server.post("/flush_cache", {})
    assert flush.status_code == (200 if mode == "retract" else 400), flush.text
    assert server.post("/continue_generation", {}).status_code == 200
    answer = first.result().json()
    assert answer["text"] == alone["text"]
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    assert late.result().status_code == 200


def test_a_pause_that_aborts_ends_all_requests_and_later_ones_wait(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    first = occupy(server, threads)
    assert server.post("/pause_generation", {}).status_code == 200
    assert first.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    late = threads.submit(generate, server, "I wait until it goes on", 2)
    wait_until(lambda: queued(server) == 1, 10, "it waits")
    assert server.post("/continue_generation", {}).status_code == 200
    assert late.result().status_code == 200


def test_an_urgent_request_takes_the_place_of_one_that_is_not(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    alone = generate(server, "The first of all", 60).json()
    first = occupy(server, threads, priority=0)
    assert generate(server, "Now!", 2, priority=100).status_code == 200
    assert not first.done()
    answer = first.result().json()
    assert answer["text"] == alone["text"]
    assert answer["meta_info"]["num_retractions"] == 1
    assert server.metric("millstream_num_preempted_requests_total") == 1


def test_a_request_is_explained_while_it_waits_and_after_its_end(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    first = occupy(server, threads)
    second = threads.submit(generate, server, "And the second", 3, rid="mine")
    wait_until(lambda: queued(server) == 1, 10, "it waits")
    story = requests.get(server.url + "/debug/requests/mine", timeout=10).json()
    assert [event["what"] for event in story["events"]][:1] == ["queued"]
    assert (first.result().status_code, second.result().status_code) == (200, 200)
    story = requests.get(server.url + "/debug/requests/mine", timeout=10).json()
    kinds = [event["what"] for event in story["events"]]
    assert kinds[0] == "queued"
    assert kinds[-4:] == ["admitted", "chunk", "first_token", "ended"]
    assert story["events"][kinds.index("admitted")]["waited_seconds"] > 0.5
    told = millstream("explain", "mine", "--base-url", server.url)
    assert told.returncode == 0, told.stderr
    assert "rows" in told.stdout
    unknown = millstream("explain", "nobody", "--base-url", server.url)
    assert unknown.returncode == 1
    assert unknown.stderr.count("\n") == 1
    assert requests.get(server.url + "/debug/requests/nobody", timeout=10).status_code == 404


def test_what_a_server_recorded_replays_without_a_difference(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    recording = tmp_path / "schedule.jsonl"
    flags = ("--record-schedule", str(recording), "--max-running-requests", "4")
    with serving("smollm2", *flags, program=FAKE_WORKER) as server:
        futures = [threads.submit(generate, server, f"Prompt {index} " * 20, 20 + index) for index in range(16)]
        gone = threading.Thread(target=leave_early, args=(server,))
        gone.start()
        assert {future.result().status_code for future in futures} == {200}
        gone.join()
        wait_until(lambda: running(server) == 0, 10, "the end of all")
        assert server.stop() == 0
        replayed = millstream("replay", str(recording))
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        lines = recording.read_text().splitlines()
        assert len(lines) > 100
        assert json.loads(lines[0])
    again = millstream("serve", "smollm2", "--port", "0", *flags)
    assert again.returncode == 2
    assert "--record-schedule" in again.stderr.splitlines()[-1]


def leave_early(server: ServerProcess) -> None:
    """A client that reads a little of a long stream and goes."""
    params = {"max_new_tokens": 500, "ignore_eos": True}
    body = {"text": "Too long", "sampling_params": params, "stream": True}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=30) as response:
        next(response.iter_lines())
