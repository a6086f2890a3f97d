"""--strict-params: a field that the route does not know is refused by name; without the flag it is ignored."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tokenizer_manager.live_server import LiveServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi", "mood": "good"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "user": "u", "store": False, "metadata": {}},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
    "/abort_request": {"rid": "x"},
    "/pause_generation": {"mode": "in_place"},
}


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with LiveServer(http={"strict_params": True}) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_an_unknown_field_is_refused_by_name(strict: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = strict.post(path, body | {"tempreature": 0.5})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "tempreature", "unknown_parameter")
    assert strict.post(path, body).status == 200
    strict.post("/continue_generation", None)


def test_without_the_flag_it_is_ignored(shared_server: LiveServer) -> None:
    for path, body in BODIES.items():
        assert shared_server.post(path, body | {"tempreature": 0.5}).status == 200
        shared_server.post("/continue_generation", None)


def test_a_name_without_end_is_cut(strict: LiveServer) -> None:
    answer = strict.post("/v1/completions", {"prompt": "a", "x" * 5000: 1})
    assert answer.status == 400
    assert len(answer.error["param"]) == 200
