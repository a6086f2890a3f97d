"""GET /debug/requests/{rid} and `millstream explain`: what became of a request, by any of its names."""

import time
from typing import Any

import pytest

from millstream.__main__ import main
from millstream.tokenizer_manager.call import Call
from millstream.tokenizer_manager.commands.explain_text import explanation_lines, sentence
from millstream.tokenizer_manager.req_state import ReqState
from millstream.tokenizer_manager.request_history import RequestHistory
from tests.tokenizer_manager.live_server import LiveServer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
QUEUED = {"seconds": 0.001, "step": 7, "what": "queued", "position": 1, "queue_tokens": 20, "policy": "fcfs"}


def explain(server: LiveServer, name: str) -> Any:
    answer = server.request("GET", f"/debug/requests/{name}")
    assert answer.status == 200
    return answer.json


def test_a_request_that_has_ended_is_found_by_label_rid_and_the_responses_id(server: LiveServer) -> None:
    server.backend.num_cached = 2
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 3, "rid": "mine"})
    rid = server.backend.requests[0].rid
    found = explain(server, "mine")
    for name in (rid, answer.json["id"], rid.removeprefix("mine-")):
        assert explain(server, name) == found | {"arrival_time": pytest.approx(found["arrival_time"], abs=0.01)}
    assert 0 <= time.time() - found.pop("arrival_time") < 5
    assert 0 < found.pop("first_output_seconds") <= found.pop("ended_seconds") < 5
    assert found == {
        "rid": rid,
        "label": "mine",
        "status": "ended",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 3,
        "num_retractions": 0,
        "events": [QUEUED],
    }


def test_a_request_that_runs_tells_what_has_not_happened_as_null(server: LiveServer) -> None:
    server.backend.paused = True
    with server.send("POST", CHAT, {"messages": HELLO, "rid": "mine", "stream": True}):
        server.until(lambda: server.backend.num_running == 1)
        found = explain(server, "mine")
        assert (found["status"], found["events"]) == ("running", [QUEUED])
        for name in ("finish_reason", "first_output_seconds", "ended_seconds", "completion_tokens"):
            assert found[name] is None
        server.call(server.backend.step)
        assert explain(server, "mine")["first_output_seconds"] > 0


def test_what_the_scheduler_does_not_know_is_told_as_far_as_it_is_known(server: LiveServer) -> None:
    server.post("/generate", {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 1}})
    server.backend._ended.clear()
    found = explain(server, "mine")
    assert (found["status"], found["completion_tokens"], found["events"]) == ("ended", 1, [])
    server.backend.paused = True
    with server.send("POST", CHAT, {"messages": HELLO, "rid": "other"}):
        server.until(lambda: server.backend.num_running == 1)
        server.call(server.backend._running.clear)
        assert explain(server, "other")["status"] == "sent"


@pytest.mark.parametrize("name", ["nobody", "chatcmpl-nobody", "a%20b", "%00", "x" * 5000])
def test_an_id_that_nobody_had_is_a_404_and_the_scheduler_is_not_asked(server: LiveServer, name: str) -> None:
    answer = server.request("GET", f"/debug/requests/{name}")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "request_not_found", "rid")
    assert server.backend.received == []


def test_a_batch_is_found_by_its_call_and_each_of_it_by_its_own_id(server: LiveServer) -> None:
    server.post("/generate", {"text": ["a", "b", "c"], "rid": "mine", "sampling_params": {"max_new_tokens": 1}})
    found = explain(server, "mine")
    assert found["num_requests"] == 3
    assert [each["label"] for each in found["requests"]] == ["mine-0", "mine-1", "mine-2"]
    assert explain(server, "mine-1") == found["requests"][1] | {
        "arrival_time": pytest.approx(found["requests"][1]["arrival_time"], abs=0.01)
    }


def test_a_label_that_is_used_again_means_the_later_request(server: LiveServer) -> None:
    for length in (1, 2):
        server.post(CHAT, {"messages": HELLO, "max_tokens": length, "rid": "mine"})
        assert explain(server, "mine")["completion_tokens"] == length
    server.backend.paused = True
    with server.send("POST", CHAT, {"messages": HELLO, "rid": "mine"}):
        server.until(lambda: server.backend.num_running == 1)
        assert explain(server, "mine")["status"] == "running"


def test_a_request_whose_client_has_gone_is_still_found(server: LiveServer) -> None:
    server.backend.paused = True
    server.send("POST", CHAT, {"messages": HELLO, "rid": "mine"}).close()
    server.until(lambda: len(server.backend.aborts) == 1 and server.manager.num_inflight == 0)
    assert explain(server, "mine")["finish_reason"]["type"] == "abort"


def test_the_history_is_bounded_and_forgets_every_name_of_the_oldest() -> None:
    history = RequestHistory(max_requests=10)
    for number in range(100):
        call = Call(float(number), f"call{number}", label=f"label{number % 30}")
        for index in range(2):
            history.add(ReqState(call, f"{number}-{index}", None, index=index, prompt_len=1, stream=False))
    assert len(history) == 10
    assert [record.rid for record in history.find("label9")] == ["99-0", "99-1"]
    assert history.find("label4") == []
    assert len(history._rids_of) == 10 + 5 + 5


def test_the_command_prints_one_line_an_event(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.post(CHAT, {"messages": HELLO, "max_tokens": 3, "stop": "x", "rid": "mine"})
    assert main(["explain", "mine", "--base-url", f"{server.url}/"]) == 0
    first, facts, event = capsys.readouterr().out.splitlines()
    rid = server.backend.requests[0].rid
    assert first == f"request {rid} (label mine): ended, length"
    assert "7 prompt tokens (0 cached), 3 output tokens" in facts
    assert event == "       0.001 s  step 7       joined the queue, where 1 requests with 20 tokens waited, under fcfs"


def test_the_command_fails_in_one_line(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    for rid, base_url, message in (
        ("nobody", server.url, "No request has this id"),
        ("a/b c?d", server.url, "No request has this id"),
        ("x", "http://127.0.0.1:1", "cannot be reached"),
        ("x", "nonsense", "cannot be reached"),
        ("x", f"{server.url}/metrics?", "not as a millstream server"),
    ):
        assert main(["explain", rid, "--base-url", base_url]) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1
        assert output.err.startswith("millstream explain: error: ")
        assert message in output.err


def test_a_batch_is_printed_one_request_after_the_other(server: LiveServer) -> None:
    server.post("/generate", {"text": ["a", "b"], "rid": "mine", "sampling_params": {"max_new_tokens": 1}})
    lines = list(explanation_lines(explain(server, "mine")))
    assert lines[0] == "2 requests of one call"
    assert len([line for line in lines if line.startswith("request mine-")]) == 2


def event(what: str, **numbers: Any) -> dict[str, Any]:
    return {"seconds": 1.0, "step": 17, "what": what, **numbers}


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        (
            event(
                "blocked",
                reason="memory",
                steps=8,
                last_step=24,
                for_seconds=0.4119,
                need=912,
                rem_total_tokens=640,
            ),
            "waited 0.412 s in step 17..24: memory: needs 912 tokens, 640 left",
        ),
        (
            event("blocked", reason="rows", steps=2, last_step=18, for_seconds=0.1, rows=4),
            "waited 0.100 s in step 17..18: every row is taken (--max-running-requests): 4 rows",
        ),
        (
            event("blocked", reason="some_new_rule", steps=1, last_step=17, for_seconds=0.0, odd_number=5),
            "waited 0.000 s in step 17..17: some new rule: odd number 5",
        ),
        (event("first_token"), "its first token is back"),
        (event("chunk", start=0, end=512), "computes positions 0 up to 512"),
        (
            event("ended", reason="abort", tokens=3, retractions=0, steps=4, message="gone", status_code=499),
            "ended by abort after 3 output tokens, 4 steps and 0 retractions: message gone, status code 499",
        ),
        (event("moved_to_host", pages=3, why="cold"), "moved to host: pages 3, why cold"),
        (event("teleported"), "teleported"),
        (event("chunk", start=5), "chunk: start 5"),
        (
            event("admitted", waited_seconds="inf", row=1, cached_tokens=0, new_tokens=1),
            "admitted: waited seconds inf, row 1, cached tokens 0, new tokens 1",
        ),
    ],
)
def test_every_kind_of_event_has_words_unknown_ones_too(noted: dict[str, Any], words: str) -> None:
    assert sentence(noted) == words
