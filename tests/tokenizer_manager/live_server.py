"""The real HTTP server on a real socket, in a thread of its own, in front of an EchoBackend."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import tokenizers
import uvloop
from aiohttp import web

from millstream.common.token_bytes import byte_alphabet
from millstream.common.tokenizer import Tokenizer
from millstream.common.tokenizer_parts import TokenizerParts
from millstream.tokenizer_manager.app import build_app
from millstream.tokenizer_manager.chat.chat_prompt import ChatRenderer
from millstream.tokenizer_manager.http_server import HTTPRunner
from millstream.tokenizer_manager.metrics import Metrics
from millstream.tokenizer_manager.sandbox.template_pool import TemplateError
from millstream.tokenizer_manager.tokenizer_manager import TokenizerManager
from tests.tokenizer_manager.echo_backend import EchoBackend

MODEL = "echo"
END = "<|end|>"
END_ID = 256
VOCAB_SIZE = 257
CONTEXT_LEN = 300
MAX_BODY_BYTES = 64 * 1024


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and `END`."""
    vocab = dict(byte_alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(TokenizerParts(backend, {"eos_token": END}, [END_ID], {}))


class LineRenderer:
    """A chat template of one line a message, that refuses one keyword."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        if "forbidden" in (chat_template_kwargs or {}):
            raise TemplateError("the template does not take that", "chat_template_kwargs")
        lines = [f"{message['role'][0]}:{message['content']}" for message in messages]
        return "\n".join([*lines, *(["a:"] if add_generation_prompt else [])])


@dataclass
class Answer:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; fails where the shape is not the one that all errors have."""
        error: dict[str, Any] = self.json["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert isinstance(error["message"], str)
        assert isinstance(error["code"], str)
        assert 0 < len(error["message"]) <= 1000
        return error


class LiveServer:
    """Use as a context: the server lives in it. `options` are those of its TokenizerManager, `http` of build_app."""

    def __init__(
        self,
        *,
        ready: bool = True,
        renderer: ChatRenderer | None = None,
        http: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.backend = EchoBackend(byte_tokenizer(), CONTEXT_LEN, VOCAB_SIZE)
        self.manager: TokenizerManager
        self.runner: HTTPRunner
        self._ready = ready
        self._options = options
        self._http = http or {}
        self._renderer = renderer or LineRenderer()
        self._loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run_thread)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until the condition holds on the server's loop."""
        deadline = time.monotonic() + seconds
        while not self.call(condition):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    @property
    def num_connections(self) -> int:
        """Connections that the server holds."""
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, raw: bytes = b""
    ) -> Answer:
        """One request on a connection of its own; `body` is sent as JSON, `raw` as it is."""
        connection, response = self.open(method, path, body, headers, raw=raw)
        with connection, response:
            return Answer(response.status, response.headers, response.read())

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """POST JSON."""
        return self.request("POST", path, body, headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; [DONE] stands as the string."""
        connection, response = self.open("POST", path, body)
        with connection, response:
            assert response.status == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return list(parse_events(response.read()))

    def open(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, raw: bytes = b""
    ) -> tuple["Connection", http.client.HTTPResponse]:
        """Send a request and return when the headers of the response are here."""
        connection = self.send(method, path, body, headers, raw=raw)
        return connection, connection.getresponse()

    def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, raw: bytes = b""
    ) -> "Connection":
        """Send a request and do not wait."""
        connection = Connection("127.0.0.1", self.port, timeout=10)
        sent = raw or (json.dumps(body).encode() if body is not None else None)
        given = {"Content-Type": "application/json"} if sent is not None else {}
        connection.request(method, path, sent, {**given, **(headers or {})})
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series."""
        text = self.request("GET", "/metrics").body.decode()
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == f"millstream_{name}" and wanted <= set(
                series.strip("}").split("{")[1].split(",")
            ):
                return float(value)
        raise KeyError(name)

    def _run_thread(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.manager = TokenizerManager(
            served_model_names=[MODEL, "org/echo"],
            send=self.backend.send,
            metrics=Metrics(MODEL),
            random_seed=0,
            log_requests=True,
            **self._options,
        )
        self.backend.receive = self.manager.on_message
        app = build_app(
            self.manager,
            self._renderer,
            info={"args": {"port": self.port}},
            max_body_bytes=MAX_BODY_BYTES,
            **self._http,
        )
        self.runner = HTTPRunner(app)
        await self.runner.setup()
        await web.SockSite(self.runner, self._listener).start()
        if self._ready:
            self.manager.set_tokenizer(byte_tokenizer())
            self.backend.report_ready()
        self._started.set()
        await self._stop.wait()
        await self.runner.cleanup()


class Connection(http.client.HTTPConnection):
    """An HTTP connection that is a context."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_events(body: bytes) -> Iterator[Any]:
    """The values of `data:` events; fails on any other line."""
    assert body.endswith(b"\n\n")
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data)
