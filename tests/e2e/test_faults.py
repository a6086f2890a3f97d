"""Every kind of process killed while starting, idle and under load: what clients see, how the server ends, what is left."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.server_process import ServerProcess, make_directory, serving, wait_until

FAKE_WORKER = ("-m", "tests.e2e.fake_server")
CHILDREN = ("tp_worker.0", "scheduler", "detokenizer")
NOTICE_SECONDS = 3 * 2.0
NUM_STREAMS = 4


class Client(threading.Thread):
    """One request that is open while the fault happens."""

    def __init__(self, server: ServerProcess, stream: bool) -> None:
        super().__init__(daemon=True)
        self.url = server.url
        self.stream = stream
        self.started = threading.Event()
        self.status = 0
        self.events: list[dict[str, Any]] = []
        self.body: dict[str, Any] = {}
        self.ended_at = 0.0

    def run(self) -> None:
        """Send the request and read it to its end, whatever that is."""
        body = {"model": "smollm2", "prompt": "Hello", "max_tokens": 7000, "ignore_eos": True, "stream": self.stream}
        if not self.stream:
            self.started.set()
        with requests.post(self.url + "/v1/completions", json=body, stream=self.stream, timeout=60) as response:
            self.status = response.status_code
            if self.stream:
                for line in response.iter_lines():
                    self._read(line.decode())
            else:
                self.body = response.json()
        self.ended_at = time.monotonic()

    def _read(self, line: str) -> None:
        self.started.set()
        if line.startswith("data: {"):
            self.events.append(json.loads(line.removeprefix("data: ")))

    def check_failed(self) -> None:
        """The stream closed with an error event; the plain request got a 5xx body."""
        error = self.events[-1]["error"] if self.stream else self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert self.status == (200 if self.stream else self.status)
        assert self.stream or 500 <= self.status < 600


def start_load(server: ServerProcess) -> list[Client]:
    """Streams and plain requests, all of them running."""
    clients = [Client(server, stream=index % 2 == 0) for index in range(2 * NUM_STREAMS)]
    for client in clients:
        client.start()
    assert all(client.started.wait(30) for client in clients)
    wait_until(lambda: server.metric("millstream_num_running_reqs") == len(clients), 30, "all requests running")
    return clients


def check_clients_failed(clients: list[Client], killed_at: float) -> None:
    for client in clients:
        client.join(30)
        assert not client.is_alive()
        client.check_failed()
        assert client.ended_at - killed_at < NOTICE_SECONDS


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with serving("smollm2", program=FAKE_WORKER) as server:
        yield server


def check_failed_because_of(server: ServerProcess, name: str) -> None:
    assert server.wait() == 1
    assert server.last_line == f"millstream: error: {name} was killed by SIGKILL"


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_killed_while_starting_ends_the_server_with_its_name(name: str) -> None:
    server = ServerProcess("smollm2", program=FAKE_WORKER)
    try:
        server.child(name).kill()
        check_failed_because_of(server, name)
    finally:
        server.kill()


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_killed_when_idle_ends_the_server_with_its_name(server: ServerProcess, name: str) -> None:
    server.complete()
    server.child(name).kill()
    check_failed_because_of(server, name)


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_killed_under_load_gives_every_client_an_error(server: ServerProcess, name: str) -> None:
    clients = start_load(server)
    child = server.child(name)
    killed_at = time.monotonic()
    child.kill()
    check_clients_failed(clients, killed_at)
    check_failed_because_of(server, name)


def test_a_rank_killed_under_load_takes_the_other_rank_with_it() -> None:
    with serving("smollm2", "--tp-size", "2") as server:
        clients = start_load(server)
        child = server.child("tp_worker.1")
        killed_at = time.monotonic()
        child.kill()
        check_clients_failed(clients, killed_at)
        check_failed_because_of(server, "tp_worker.1")


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that_hangs_ends_the_server_after_the_watchdog_s_time(name: str) -> None:
    with serving("smollm2", "--watchdog-timeout", "2", program=FAKE_WORKER) as server:
        clients = start_load(server)
        server.child(name).send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        check_clients_failed(clients, stopped_at + 2)
        assert server.wait() == 1
        assert name.replace("tp_worker.0", "rank 0 has not") in server.last_line


@pytest.mark.parametrize("phase", ["starting", "idle", "under load"])
def test_when_the_main_process_is_killed_nothing_is_left(phase: str) -> None:
    server = ServerProcess("smollm2", program=FAKE_WORKER)
    try:
        if phase == "starting":
            for name in CHILDREN:
                server.child(name)
        else:
            server.wait_until_ready()
        if phase == "under load":
            start_load_without_waiting(server)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    finally:
        server.kill()


def start_load_without_waiting(server: ServerProcess) -> None:
    """Clients whose connection will be cut."""
    for _ in range(NUM_STREAMS):
        client = Client(server, stream=True)
        client.run = lambda run=client.run: _ignoring_cut(run)  # type: ignore[method-assign]
        client.start()
        assert client.started.wait(30)


def _ignoring_cut(run: Any) -> None:
    with contextlib.suppress(requests.RequestException):
        run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_starting_ends_the_server_soon(number: int) -> None:
    server = ServerProcess("smollm2", program=FAKE_WORKER)
    try:
        server.child("scheduler")
        start = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - start < NOTICE_SECONDS
    finally:
        server.kill()


def test_a_drain_refuses_new_requests_and_finishes_running_ones(server: ServerProcess) -> None:
    done: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: done.update(server.complete(max_tokens=300, ignore_eos=True)))
    thread.start()
    wait_until(lambda: server.metric("millstream_num_running_reqs") == 1, 30, "a running request")
    server.remember_processes()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: requests.get(server.url + "/readyz", timeout=5).status_code == 503, 3, "/readyz 503")
    refused = server.post("/v1/completions", {"model": "smollm2", "prompt": "Hi"})
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert server.wait() == 0
    thread.join(10)
    assert done["usage"]["completion_tokens"] == 300


def test_requests_that_outlive_the_drain_get_an_error_and_the_exit_is_clean() -> None:
    with serving("smollm2", "--drain-timeout", "0.5", program=FAKE_WORKER) as server:
        clients = start_load(server)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 3 * 2.5
        check_clients_failed(clients, start + 0.5)


def test_a_second_signal_ends_a_drain_at_once(server: ServerProcess) -> None:
    clients = start_load(server)
    server.remember_processes()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: requests.get(server.url + "/readyz", timeout=5).status_code == 503, 3, "/readyz 503")
    start = time.monotonic()
    code = server.stop()
    assert time.monotonic() - start < NOTICE_SECONDS
    assert code == 128 + signal.SIGTERM
    check_clients_failed(clients, start)


def test_a_new_server_sweeps_what_a_dead_one_left() -> None:
    directory = make_directory()
    dead = directory / "millstream-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "tokenizer_manager-scheduler").touch()
    server = ServerProcess("smollm2", program=FAKE_WORKER, directory=directory)
    try:
        server.wait_until_ready()
        assert not dead.exists()
        assert server.stop() == 0
    finally:
        server.kill()
