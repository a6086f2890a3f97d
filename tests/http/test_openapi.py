"""/openapi.json, and what Schemathesis makes of it: bodies that fit it and bodies that do not, against a server."""

from typing import Any

import jsonschema
import pytest

from millstream.tokenizer_manager.access import Level
from millstream.tokenizer_manager.api import openapi
from millstream.tokenizer_manager.routes import Route
from tests.e2e.server_process import serving
from tests.http.fuzz import FAKE_SERVER, PAUSE, fuzz
from tests.tokenizer_manager.live_server import LiveServer


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


def test_a_route_without_an_answer_does_not_start() -> None:
    async def handler(request: Any) -> Any:
        raise NotImplementedError

    with pytest.raises(LookupError, match="/new"):
        openapi.openapi_document([Route("GET", "/new", handler, "something new", Level.USER)])
