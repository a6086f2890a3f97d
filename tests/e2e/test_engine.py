"""The engine without HTTP: the same answers, from any thread and loop, and nothing left behind."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream import Engine
from millstream.common.flags import ConfigError
from millstream.common.model_error import ModelError
from millstream.tokenizer_manager.api_error import APIError
from tests.e2e.engine_programs import num_inflight
from tests.e2e.server_process import ServerProcess, environment, wait_until

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("smollm2", max_total_tokens=20_000) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(default_server: ServerProcess) -> ServerProcess:
    return default_server


def answer(body: Any) -> Any:
    """What two runs of one request have in common."""
    if isinstance(body, list):
        return [answer(each) for each in body]
    info = {
        name: value for name, value in body["meta_info"].items() if name not in {"id", "e2e_latency", "cached_tokens"}
    }
    return body["text"], body["output_ids"], info


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "The capital of France is", "sampling_params": GREEDY},
        {"text": "Once upon a time", "sampling_params": SEEDED},
        {"text": ["1 2 3 4 5", "a b c d e"], "sampling_params": [GREEDY | {"max_new_tokens": 3}] * 2},
        {"input_ids": [504, 2988, 314], "sampling_params": GREEDY | {"stop": ["e"]}},
        {"text": "Answer:", "sampling_params": SEEDED | {"regex": "(yes|no), [a-z]{3}"}},
    ],
)
def test_it_answers_as_the_http_route_does(engine: Engine, server: ServerProcess, fields: dict[str, Any]) -> None:
    over_http = server.post("/generate", fields).json()
    given = {"prompt" if name == "text" else name: value for name, value in fields.items()}
    assert answer(engine.generate(**given)) == answer(over_http)
    assert answer(asyncio.run(engine.async_generate(**given))) == answer(over_http)
    events = list(engine.generate(**given, stream=True))
    last = {event.pop("index", 0): event for event in events}
    whole = over_http if isinstance(over_http, list) else [over_http]
    assert [answer(last[index]) for index in range(len(whole))] == answer(whole)


def test_vectors_are_those_of_the_http_route(engine: Engine, server: ServerProcess) -> None:
    body = {"input": ["a cat", "a dog"], "pooling": "mean"}
    over_http = [each["embedding"] for each in server.post("/v1/embeddings", body).json()["data"]]
    for ours, theirs in zip(engine.encode(["a cat", "a dog"], pooling="mean"), over_http, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert asyncio.run(engine.async_encode("a cat", pooling="mean")) == engine.encode("a cat", pooling="mean")
    with pytest.raises(APIError, match="pooling"):
        engine.encode("a cat", pooling="max")


def test_async_requests_run_together_and_stream(engine: Engine) -> None:
    async def stream(prompt: str) -> list[dict[str, Any]]:
        return [event async for event in await engine.async_generate(prompt, GREEDY, stream=True)]

    async def run() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(stream(f"Number {index} is") for index in range(4)))

    for events in asyncio.run(run()):
        texts = [event["text"] for event in events]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert len(events) > 2
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]


def test_it_can_be_called_where_a_loop_runs_as_in_a_notebook(engine: Engine) -> None:
    async def cell() -> str:
        return str(engine.generate("The capital of France is", GREEDY)["text"])

    assert "Paris" in asyncio.run(cell())


def test_a_bad_request_names_the_field_as_over_http(engine: Engine, server: ServerProcess) -> None:
    body = {"text": "x", "sampling_params": {"top_p": 2}}
    with pytest.raises(APIError) as caught:
        engine.generate("x", {"top_p": 2})
    assert caught.value.body() == server.post("/generate", body).json()
    with pytest.raises(TypeError, match="no argument 'promt'"):
        engine.generate(promt="x")
    with pytest.raises(APIError, match="text or input_ids is required"):
        engine.generate()
    with pytest.raises(TypeError, match="bytes"):
        engine.generate(b"abc")  # type: ignore[arg-type]


def test_what_nobody_waits_for_any_more_is_aborted(engine: Engine) -> None:
    long = {"max_new_tokens": 8000, "ignore_eos": True}
    stream = engine.generate("Count: 1 2 3", long, stream=True)
    next(stream)
    assert num_inflight(engine) == 1
    stream.close()
    wait_until(lambda: num_inflight(engine) == 0, 10, "a closed stream is aborted")

    async def leave() -> None:
        events = await engine.async_generate("Count: 1 2 3", long, stream=True)
        await anext(events)
        await events.aclose()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate("Count: 1 2 3", long), 0.3)

    asyncio.run(leave())
    wait_until(lambda: num_inflight(engine) == 0, 10, "a cancelled call is aborted")


def test_the_collector_may_close_a_stream_in_the_engines_own_thread(engine: Engine) -> None:
    stream = engine.generate("Count: 1 2 3", {"max_new_tokens": 8000, "ignore_eos": True}, stream=True)
    next(stream)

    async def collect() -> None:
        stream.close()

    engine._thread.submit(collect()).result(10)
    wait_until(lambda: num_inflight(engine) == 0, 10, "a collected stream is aborted")
    assert "Paris" in engine.generate("The capital of France is", GREEDY)["text"]


def test_wrong_arguments_start_nothing() -> None:
    with pytest.raises(ConfigError, match="--tp-size must be from 1 to 64, not 0"):
        Engine("smollm2", tp_size=0)
    with pytest.raises(ConfigError, match="Engine's max_total_tokens must be a whole number, not '9'"):
        Engine("smollm2", max_total_tokens="9")
    with pytest.raises(ConfigError, match="does not compile"):
        Engine("smollm2", chat_template=str(Path(__file__).with_name("broken.jinja")))
    with pytest.raises(ConfigError, match="Engine has no argument tpsize"):
        Engine("smollm2", tpsize=2)
    with pytest.raises((ConfigError, ModelError), match="--model-path /nowhere"):
        Engine("/nowhere")


@contextlib.contextmanager
def started(name: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-P", "-W", "error", "-m", "tests.e2e.engine_programs", name]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "name", ["forget_in_the_middle_of_a_stream", "fork_and_delete", "interrupt_and_use_after_the_end", "lose_a_child"]
)
def test_it_ends_cleanly_with_its_program(name: str) -> None:
    with started(name) as process:
        _, errors = process.communicate(timeout=60)  # children would keep the pipe open
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Warning" not in errors


def test_its_processes_end_when_the_program_is_killed() -> None:
    with started("wait_to_be_killed") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        process.communicate(timeout=10)  # the pipe's other ends are the children's
