"""Attacks on a running server from beside HTTP, and on what it loads (the P list; P10 and P12 are in test_access.py)."""

import ipaddress
import json
import os
import pickle
import random
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import zmq

from tests.e2e.server_process import ServerProcess, environment, millstream, serving, wait_until
from tests.http.bad_inputs import json_schema
from tests.model.tiny_models import save_model
from tests.text.sample_tokenizers import byte_level_backend, write_directory

NUM_FRAMES = 1000
TEMPLATE = """
{%- set ask = messages[0].content -%}
{%- if ask == 'class' -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif ask == 'format' -%}{{ '{0.__class__}'.format('') }}
{%- elif ask == 'big' -%}{{ 'a' * 1000000000 }}
{%- elif ask == 'loop' -%}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif ask == 'import' -%}{{ self.__init__.__globals__.__builtins__.__import__('os').system('id') }}
{%- else -%}{{ ask }}{%- endif -%}
"""


NOTE_CONNECTS = """
import os, socket, sys
def note(line):
    log = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{{os.getpid()}} {{line}}\\n".encode())
    os.close(log)
def audit(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        if event != "socket.connect" or args[0].family != socket.AF_UNIX:
            note(f"{{event}} {{args[event in ('socket.connect', 'socket.sendto')]!r}}")
sys.addaudithook(audit)
note("watched")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every process of the server notes that it connects to something, in the file `connects`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NOTE_CONNECTS.format(path=str(folder / "connects")))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("template") / "hostile.jinja"
    path.write_text(TEMPLATE)
    with serving("smollm2", "--tp-size", "2", "--chat-template", str(path), site=site) as server:
        yield server


def test_only_http_listens_beyond_this_machine(server: ServerProcess) -> None:
    """P1, with the store and the sockets of two ranks."""
    port = int(server.url.rpartition(":")[2])
    processes = [psutil.Process(server.process.pid), *server.remember_processes().values()]
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", port) in listening
    assert not [address for address in listening if address[0] not in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}]


class Pwn:
    """What would touch a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def test_pickles_and_random_frames_at_every_socket_are_counted_and_dropped(
    server: ServerProcess, tmp_path: Path
) -> None:
    """P2."""
    (run_dir,) = server.directory.glob("millstream-*")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    paths = [path for path in run_dir.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert len(paths) >= 6
    bait = tmp_path / "pwn"
    rng = random.Random(7)
    frames = [pickle.dumps(Pwn(bait)), *[rng.randbytes(rng.randrange(200)) for _ in range(NUM_FRAMES)]]
    before = server.metric("millstream_dropped_frames_total")
    context = zmq.Context()
    for path in paths:
        with context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 5000)
            socket.connect(f"ipc://{path}")
            for frame in frames:
                socket.send(frame)
    context.term()
    server.complete("Hello", max_tokens=4)

    def dropped() -> float:
        return server.metric("millstream_dropped_frames_total") - before

    wait_until(lambda: dropped() >= len(frames) * len(paths), 20, f"{len(frames) * len(paths)} frames dropped")
    assert server.complete("Hello", max_tokens=4)["choices"]
    assert not bait.exists()


@pytest.mark.parametrize(
    "path", ["update_weights_from_tensor", "collective_rpc", "set_internal_state", "load_lora_adapter"]
)
def test_routes_that_take_objects_are_not_there(server: ServerProcess, path: str) -> None:
    """P4."""
    response = requests.post(f"{server.url}/{path}", data=pickle.dumps({}), timeout=10)
    assert response.status_code == 404


@pytest.mark.parametrize("flags", [["--api-key", ""], ["--api-key-file", "/no/such/file"]])
def test_an_empty_key_does_not_start(flags: list[str]) -> None:
    """P6."""
    done = millstream("serve", "smollm2", "--port", "0", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert "Traceback" not in done.stderr


LOAD = """
import sys
seen = []
def audit(event, args):
    if event == "import" and "evil" in args[0] or event == "open" and str(args[0]).endswith(".py") and "evil" in str(args[0]):
        seen.append((event, args[0]))
    if event in ("os.system", "os.exec", "socket.connect"):
        seen.append((event, args))
sys.addaudithook(audit)
import logging
logging.basicConfig()
from pathlib import Path
from millstream.common.config import ServerArgs
from millstream.common.tokenizer import load_tokenizer
from millstream.tokenizer_manager.served_model import find_served_model
from tests.model.run_decoder import load_decoder
path = Path(sys.argv[1])
find_served_model(ServerArgs(model_path=str(path), device="cpu", max_total_tokens=64, kernel_backend="torch"))
load_tokenizer(path)
load_decoder(path, quantization="none")
assert not seen, seen
"""


def test_a_model_that_brings_code_is_loaded_without_it(tmp_path: Path) -> None:
    """P7."""
    folder = save_model("llama", tmp_path / "model")
    write_directory(folder, byte_level_backend())
    (folder / "modeling_evil.py").write_text(f"import os; os.system('touch {tmp_path}/pwn')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Config"},
        "_attn_implementation_internal": "evil/kernels",
        "trust_remote_code": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config |= {"auto_map": {"AutoTokenizer": ["modeling_evil.Tokenizer", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(folder)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for field in ("auto_map", "trust_remote_code", "_attn_implementation_internal"):
        assert f"{field} is ignored" in done.stderr
    assert not (tmp_path / "pwn").exists()


def test_a_hostile_template_fails_its_chat_alone_in_time_and_memory(server: ServerProcess) -> None:
    """P8: a stream beside it goes on, and the main process does not grow."""
    main = psutil.Process(server.process.pid)
    before = main.memory_info().rss
    body = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.post("/v1/completions", body, stream=True) as stream:
        lines = stream.iter_lines()
        next(lines)
        for ask in ("class", "format", "big", "loop", "import"):
            begin = time.monotonic()
            chat = {"messages": [{"role": "user", "content": ask}], "max_tokens": 1}
            response = server.post("/v1/chat/completions", chat)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) in {(400, "chat_template_error"), (400, "empty_prompt")}, ask
            assert time.monotonic() - begin < 3 * 2.5, ask  # 2 s and a new child
            assert "Traceback" not in response.text
            assert "/" not in error["message"]
        assert stream.raw.closed is False
        assert list(lines)[-2] == b"data: [DONE]"
    assert main.memory_info().rss - before < 64 * 2**20
    works = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    assert works.status_code == 200


ELSEWHERE = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://192.0.2.1/x.png"}}]}
        ]
    },
    {"messages": [{"role": "user", "content": "hi"}], "api_base": "http://192.0.2.1", "max_tokens": 1},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        **json_schema({"$ref": "http://192.0.2.1/schema"}),
    },
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **json_schema({"type": "integer"})},
]


def test_no_process_connects_to_another_machine(server: ServerProcess, site: Path) -> None:
    """P11, from the start of the server through the tests above to requests that name addresses."""
    statuses = [server.post("/v1/chat/completions", body).status_code for body in ELSEWHERE]
    assert statuses == [400, 200, 400, 200]
    server.seen.clear()  # children that were killed above
    processes = [psutil.Process(server.process.pid), *server.remember_processes().values()]
    noted = [line.split(" ", 2) for line in (site / "connects").read_text().splitlines()]
    watched = {int(pid) for pid, what, *_ in noted if what == "watched"}
    assert {process.pid for process in processes} <= watched
    assert len(watched) >= 7
    assert not [line for line in noted if line[1] != "watched" and not re.match(r"\(?'?(127\.|::1|localhost)", line[2])]
    peers = [each.raddr.ip for process in processes for each in process.net_connections("inet") if each.raddr]
    assert not [ip for ip in peers if not ipaddress.ip_address(ip).is_loopback]
