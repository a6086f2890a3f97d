"""From the command to the first answer."""

import re
import time
from pathlib import Path

import pytest
import requests

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(exact_server: ServerProcess) -> ServerProcess:
    return exact_server


def test_it_answers_while_it_loads_and_says_that_it_is_not_ready() -> None:
    server = ServerProcess("smollm2")
    try:
        url = server.url
        assert requests.get(url + "/livez", timeout=5).status_code == 200
        for response in (
            requests.get(url + "/readyz", timeout=5),
            server.post("/v1/chat/completions", {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}),
        ):
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) > 0
            assert response.json()["error"]["code"]
        assert server.stop() == 0
    finally:
        server.kill()


def test_the_plan_and_server_info_say_where_values_come_from_in_words(server: ServerProcess) -> None:
    assert re.search(r"^\s*set by flags  .*--log-level debug", server.log, re.MULTILINE)
    info = requests.get(server.url + "/server_info", timeout=5).json()
    assert (info["origins"]["log_level"], info["args"]["chunked_prefill_size"]) == ("flags", "auto")
    assert "page_size" not in info["origins"]


def test_idle_processes_use_under_two_percent_of_a_core(server: ServerProcess) -> None:
    server.complete()
    time.sleep(1)
    processes = {"main": server.process.pid, **{str(pid): pid for pid in server.remember_processes()}}
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    time.sleep(3)
    used = {name: (cpu_seconds(pid) - before[name]) / 3 for name, pid in processes.items()}
    assert not {name: share for name, share in used.items() if share > 3 * 0.02}


def test_a_request_id_goes_through_every_process_s_log(server: ServerProcess) -> None:
    body = {"model": "smollm2", "prompt": "Hello", "max_tokens": 2}
    response = server.post("/v1/completions", body, headers={"X-Request-Id": "find-me"})
    assert response.headers["X-Request-Id"] == "find-me"
    lines = [line for line in server.log.splitlines() if "find-me" in line]
    processes = ("tokenizer_manager", "scheduler", "tp_worker.0", "detokenizer")
    assert not [name for name in processes if not any(f" {name}: " in line for line in lines)]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


BROKEN_TEMPLATE = str(Path(__file__).with_name("broken.jinja"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("/nowhere",), "--model-path /nowhere: no such directory"),
        (("smollm2", "--tp-size", "4"), "--tp-size"),
        (("smollm2", "--max-total-tokens", "99999999999999"), "--max-total-tokens"),
        (("smollm2", "--served-model-name", ""), "--served-model-name"),
        (("smollm2", "--device", "cuda", "--tp-size", "9"), "--device cuda"),
        (("smollm2", "--context-length", "99999"), "--context-length"),
        (("smollm2", "--chat-template", "/nowhere.jinja"), "--chat-template"),
        (
            ("smollm2", "--chat-template", BROKEN_TEMPLATE),
            "broken.jinja: the chat template 'default' does not compile",
        ),
        (
            ("smollm2", "--record-schedule", "/nowhere/schedule"),
            "--record-schedule /nowhere/schedule: the file can not be made",
        ),
        (("smollm2", "--record-schedule", __file__), "the file exists already"),
    ],
)
def test_what_the_user_must_change_is_one_line_with_exit_code_2(args: tuple[str, ...], message: str) -> None:
    server = ServerProcess(*args)
    try:
        assert server.process.wait(20) == 2
        assert server.last_line.startswith("millstream: error: ")
        assert message in server.last_line
        assert "Traceback" not in server.log
        server.check_nothing_left()
    finally:
        server.kill()
