"""Pause, continue, flush, abort: by whom they are asked, what is answered, and that each request ends once."""

from typing import Any

import pytest

from millstream.common.finish_reason import FINISH_ABORT
from millstream.common.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    ControlReqOutput,
    ExplainReqOutput,
    PauseGenerationReqInput,
)
from millstream.tokenizer_manager import scheduler_calls
from millstream.tokenizer_manager.access import Caller
from millstream.tokenizer_manager.api import control_routes
from tests.tokenizer_manager.live_server import Connection, LiveServer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def status_of(connection: Connection) -> tuple[int, bytes]:
    with connection, connection.getresponse() as response:
        return response.status, response.read()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_what_runs_and_what_comes_until_it_is_over(server: LiveServer, mode: str) -> None:
    server.backend.step_seconds = 0.001
    running = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 200})
    server.until(lambda: server.backend.num_running == 1)
    answer = server.post("/pause_generation", {"mode": mode})
    assert (answer.status, answer.json) == (200, {"success": True, "message": f"paused: {mode}"})
    coming = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
    server.until(lambda: server.backend.num_running == 2)
    assert server.backend.aborts == []
    answer = server.request("POST", "/continue_generation")
    assert (answer.status, answer.json) == (200, {"success": True, "message": "goes on"})
    assert [status_of(connection)[0] for connection in (running, coming)] == [200, 200]


@pytest.mark.parametrize("body", [None, {}, {"mode": "abort"}])
def test_to_pause_aborts_what_is_open_unless_told_otherwise(server: LiveServer, body: Any) -> None:
    server.backend.paused = True
    waiting = [server.send("POST", "/v1/completions", {"prompt": ["a", "b"]}) for _ in range(3)]
    server.until(lambda: server.backend.num_running == 6)
    rids = {request.rid for request in server.backend.requests}
    assert server.post("/pause_generation", body).status == 200
    abort, pause = server.backend.received[-2:]
    assert isinstance(abort, AbortReq)
    assert set(abort.rids) == rids
    assert isinstance(pause, PauseGenerationReqInput)
    assert pause.mode == "abort"
    assert [status_of(connection)[0] for connection in waiting] == [499] * 3
    assert server.metric("num_aborted_requests_total") == 6
    with server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1}) as coming:
        server.until(lambda: server.backend.num_running == 1)
        assert server.post("/continue_generation", {}).status == 200
        assert status_of(coming)[0] == 200


def test_a_mode_that_is_none_is_refused_by_name_and_nothing_is_aborted(server: LiveServer) -> None:
    for mode in ("stop", "", 5, None):
        answer = server.post("/pause_generation", {"mode": mode})
        assert (answer.status, answer.error["param"]) == (400, "mode")
    assert server.post("/pause_generation", []).status == 400
    assert server.backend.received == []


def test_what_the_scheduler_refuses_is_a_400_with_its_reason(server: LiveServer) -> None:
    server.backend.takes_control = False
    answer = server.request("POST", "/continue_generation")
    assert (answer.status, answer.error["code"], answer.error["message"]) == (400, "continue_refused", "goes on")
    answer = server.post("/pause_generation", {"mode": "retract"})
    assert (answer.status, answer.error["code"], answer.error["message"]) == (400, "pause_refused", "paused: retract")


def test_the_state_says_that_the_server_is_paused_and_it_stays_ready(server: LiveServer) -> None:
    for path in ("/livez", "/readyz", "/health", "/server_info"):
        assert server.request("GET", path).json["paused"] is False
    server.call(lambda: server.backend.report_load(1, is_paused=True))
    for path in ("/livez", "/readyz", "/health", "/server_info"):
        answer = server.request("GET", path)
        assert (answer.status, answer.json["paused"]) == (200, True)
    assert server.metric("is_paused") == 1
    server.backend.paused = True
    assert server.request("GET", "/health_generate").status == 200
    assert server.backend.requests == []


def test_a_probe_that_waits_behind_others_which_move_is_no_illness(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_routes, "PROBE_SECONDS", 0.1)
    server.backend.paused = True
    assert server.request("GET", "/health_generate").status == 503
    with server.send("POST", CHAT, {"messages": HELLO, "stream": True}):
        server.until(lambda: server.backend.num_running == 1)
        running = server.backend.requests[-1].rid
        probe = server.send("GET", "/health_generate")
        server.until(lambda: server.backend.num_running == 2)
        server.call(lambda: server.backend._advance(running))
        assert status_of(probe)[0] == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/flush_cache"])
def test_an_answer_that_does_not_come_is_a_504(server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_calls, "ANSWER_SECONDS", 0.05)
    server.backend.answers_control = False
    answer = server.request("POST", path)
    assert (answer.status, answer.error["code"]) == (504, "control_timeout")
    late = ControlReqOutput(server.backend.received[-1].request_id, True, "late")  # type: ignore[union-attr]
    server.call(lambda: server.manager.on_message(late))
    server.call(lambda: server.manager.on_message(ExplainReqOutput("nobody", "x", None, [])))
    assert server.request("GET", "/readyz").status == 200


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation"])
def test_before_the_scheduler_is_there_and_after_a_failure_there_is_nothing_to_pause(path: str) -> None:
    with LiveServer(ready=False) as server:
        answer = server.request("POST", path)
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        server.call(lambda: server.manager.fail_all("gone"))
        assert server.request("POST", path).error["code"] == "engine_failed"


def test_a_paused_server_that_drains_can_be_told_to_go_on(server: LiveServer) -> None:
    server.backend.paused = True
    waiting = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
    server.until(lambda: server.backend.num_running == 1)
    server.call(server.manager.start_draining)
    assert server.request("POST", "/continue_generation").status == 200
    assert status_of(waiting)[0] == 200
    assert isinstance(server.backend.received[-1], ContinueGenerationReqInput)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_batch_ends_by_its_own_label_and_one_of_it_by_the_childs(server: LiveServer, path: str) -> None:
    server.backend.paused = True
    prompts = {"/v1/completions": "prompt", "/generate": "text"}[path]
    batch = server.send("POST", path, {prompts: ["a", "b", "c"], "rid": "mine"})
    other = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1, "rid": "mine-2x"})
    server.until(lambda: server.backend.num_running == 4)
    assert server.post("/abort_request", {"rid": "mine-1"}).json == {"num_aborted": 1}
    server.until(lambda: server.backend.num_running == (3 if path == "/generate" else 1))
    left = 2 if path == "/generate" else 0  # a completion fails as a whole
    assert server.post("/abort_request", {"rid": "mine"}).json == {"num_aborted": left}
    status_of(batch)
    server.until(lambda: server.manager.num_inflight == 1)
    assert server.post("/abort_request", {"rid": "mine"}).json == {"num_aborted": 0}
    server.call(server.backend.resume)
    assert status_of(other)[0] == 200
    assert server.metric("num_aborted_requests_total") == 3
    assert server.metric("num_requests_total", outcome="length") == 1


def test_however_often_a_request_is_aborted_it_ends_once(server: LiveServer) -> None:
    server.backend.paused = True
    waiting = server.send("POST", CHAT, {"messages": HELLO, "rid": "mine"})
    server.until(lambda: server.backend.num_running == 1)
    rid = server.backend.requests[0].rid

    def abort_all_ways() -> None:
        for name in ("mine", rid, "chatcmpl-" + rid.removeprefix("mine-")):
            assert server.manager.abort(name, Caller()) == 1
        server.manager.abort_all()

    server.call(abort_all_ways)
    status, body = status_of(waiting)
    assert (status, body.count(b"request_aborted")) == (499, 1)
    assert server.metric("num_requests_total", outcome="abort") == 1
    assert server.metric("num_refused_requests_total", code="queue_full") == 0


def test_a_refusal_by_the_scheduler_is_in_the_log_unless_the_queue_is_full(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    for abort in (FINISH_ABORT("waited", 503, "QueueTimeout"), FINISH_ABORT("full", 429, "QueueFull")):
        server.backend.refuse_with = abort
        server.post(CHAT, {"messages": HELLO})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].endswith("failed: waited")
