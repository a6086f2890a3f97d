"""/openapi.json, and what Schemathesis makes of it: bodies that fit it and bodies that do not, against a server."""

from typing import Any

import jsonschema
import pytest

from millstream.tokenizer_manager.access import Level
from millstream.tokenizer_manager.api import openapi, openapi_answers
from millstream.tokenizer_manager.routes import Route
from tests.e2e.server_process import serving
from tests.http.fuzz import FAKE_SERVER, PAUSE, fuzz
from tests.tokenizer_manager.live_server import MODEL, LiveServer


def test_no_request_that_the_document_allows_or_forbids_brings_a_5xx() -> None:
    with serving("smollm2", "--context-length", "128", program=FAKE_SERVER) as server:
        done = fuzz(server, "--max-examples", "4", "--phases", "fuzzing", "--no-shrink", "--exclude-path", PAUSE)
        assert done.returncode == 0, done.stdout
        assert server.complete()["choices"]


def test_the_document_describes_every_route_with_its_body(shared_server: LiveServer) -> None:
    document = shared_server.request("GET", "/openapi.json").json
    assert shared_server.runner.app is not None
    routed = {
        (route.resource.canonical.replace(":.+", ""), route.method.lower())
        for route in shared_server.runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert routed - described == {("/", "get"), ("/openapi.json", "get")}
    assert described <= routed
    posts = {path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})}
    assert posts >= {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/v1/embeddings"}


def test_its_schemas_are_valid_and_take_what_a_client_sends(shared_server: LiveServer) -> None:
    document = shared_server.request("GET", "/openapi.json").json
    for name in document["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][name])
    chat = {"$ref": "#/components/schemas/ChatCompletionRequest", **document}
    check = jsonschema.Draft202012Validator(chat)
    assert check.is_valid({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True})
    assert not check.is_valid({"messages": [{"role": "user", "content": "hi"}], "max_tokens": "5"})


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": MODEL}
NORMAL: dict[str, list[Any]] = {  # path -> bodies; None: a GET
    "/v1/chat/completions": [CHAT, {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}],
    "/v1/completions": [{"prompt": "hi", "max_tokens": 2}, {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}],
    "/v1/responses": [{"input": "hi", "max_output_tokens": 2}],
    "/v1/messages": [MESSAGES],
    "/v1/messages/count_tokens": [{name: MESSAGES[name] for name in ("messages", "model")}],
    "/generate": [
        {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
        {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}, "return_logprob": True},
    ],
    "/v1/embeddings": [{"input": "hi"}, {"input": ["a", "b"], "encoding_format": "base64"}],
    "/v1/score": [{"query": "a", "items": ["b", "c"], "label_token_ids": [97, 98]}],
    "/tokenize": [{"prompt": "hi"}, {"prompt": ["a", "b"]}, {"messages": CHAT["messages"]}],
    "/detokenize": [{"tokens": [97]}, {"tokens": [[97], [98]]}],
    "/pause_generation": [{"mode": "in_place"}],
    "/continue_generation": [{}],
    "/flush_cache": [{}],
    "/abort_request": [{"rid": "none"}],
}


def test_every_route_answers_as_the_document_says(shared_server: LiveServer) -> None:
    document = shared_server.request("GET", "/openapi.json").json
    untold = {path for path, methods in document["paths"].items() if "200" not in str(methods)}
    assert untold == openapi_answers.NEVER_OK
    finished = shared_server.post("/generate", NORMAL["/generate"][0]).headers["X-Request-Id"]
    for path, answer in openapi_answers.ANSWERS.items():
        if isinstance(answer, str):
            assert shared_server.request("GET", path).headers["Content-Type"].startswith(answer)
            continue
        for body in NORMAL.get(path, [None]):
            place = path.format(id=MODEL, rid=finished)
            found = shared_server.request("GET" if body is None else "POST", place, body)
            operation = document["paths"][path]["get" if body is None else "post"]
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert found.status == 200, (path, found.body)
            jsonschema.validate(found.json, {**schema, "components": document["components"]})


def test_a_route_without_an_answer_does_not_start() -> None:
    async def handler(request: Any) -> Any:
        raise NotImplementedError

    with pytest.raises(LookupError, match="/new"):
        openapi.openapi_document([Route("GET", "/new", handler, "something new", Level.USER)])
