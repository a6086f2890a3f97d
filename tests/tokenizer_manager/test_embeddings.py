"""POST /v1/embeddings in OpenAI's shape, and what is refused there."""

import base64
from array import array
from typing import Any

import openai
import pytest

from tests.tokenizer_manager.live_server import CONTEXT_LEN, MODEL, LiveServer


def embed(server: LiveServer, **body: Any) -> Any:
    answer = server.post("/v1/embeddings", {"model": MODEL, **body})
    assert answer.status == 200, answer.body
    return answer.json


def test_one_text(shared_server: LiveServer) -> None:
    found = embed(shared_server, input="hello")
    assert found == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [ord("h"), 5, 0]}],
        "model": MODEL,
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
        "pooling": "last",
    }
    request = shared_server.backend.requests[-1]
    assert (request.sampling_params.max_new_tokens, request.pooling, request.stream) == (0, "last", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["ab", "c"], [[97, 2, 0], [99, 1, 0]]),
        ([104, 105], [[104, 2, 0]]),
        ([[104, 105], [106]], [[104, 2, 0], [106, 1, 0]]),
    ],
)
def test_every_form_of_input_keeps_its_order(shared_server: LiveServer, given: Any, expected: Any) -> None:
    found = embed(shared_server, input=given)
    assert [item["embedding"] for item in found["data"]] == expected
    assert [item["index"] for item in found["data"]] == list(range(len(expected)))
    assert found["usage"]["prompt_tokens"] == sum(length for _, length, _ in expected)


def test_pooling_salt_and_rid_reach_the_scheduler(shared_server: LiveServer) -> None:
    found = embed(shared_server, input=["a", "b"], pooling="mean", cache_salt="s", rid="mine")
    assert [item["embedding"][2] for item in found["data"]] == [1, 1]
    assert found["pooling"] == "mean"
    requests = shared_server.backend.requests[-2:]
    assert {request.cache_salt for request in requests} == {"s"}
    assert [request.rid.split("-")[:2] for request in requests] == [["mine", "0"], ["mine", "1"]]


def test_base64_is_little_endian_float32(shared_server: LiveServer) -> None:
    found = embed(shared_server, input="hello", encoding_format="base64")
    assert array("f", base64.b64decode(found["data"][0]["embedding"])).tolist() == [104, 5, 0]


def test_the_openai_client_reads_both_encodings(shared_server: LiveServer) -> None:
    with openai.OpenAI(base_url=shared_server.url + "/v1", api_key="none") as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(model=MODEL, input=["hello", "x"], **options)  # type: ignore[call-overload]
            if options.get("encoding_format") != "base64":
                assert [item.embedding for item in found.data] == [[104, 5, 0], [120, 1, 0]]
            assert found.usage.prompt_tokens == 6


def test_many_inputs(shared_server: LiveServer) -> None:
    found = embed(shared_server, input=["a" * (1 + n % 7) for n in range(500)])
    assert [item["embedding"][1] for item in found["data"]] == [1 + n % 7 for n in range(500)]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_field"),
        ({"input": ""}, "input", "empty_prompt"),
        ({"input": []}, "input", "empty_prompt"),
        ({"input": ["a", ""]}, "input", "empty_prompt"),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": 7}, "input", "invalid_type"),
        ({"input": [100000]}, "input", "token_out_of_range"),
        ({"input": "a" * CONTEXT_LEN}, "input", "context_length_exceeded"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"input": "a", "dimensions": 2}, "dimensions", "unsupported_parameter"),
        ({"input": "a", "pooling": "max"}, "pooling", "invalid_type"),
        ({"input": "a", "messages": []}, "messages", "unsupported_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "unsupported_parameter"),
        ({"input": "a", "model": "gpt"}, "model", "model_not_found"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(shared_server: LiveServer, body: dict[str, Any], param: str, code: str) -> None:
    answer = shared_server.post("/v1/embeddings", body)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert (answer.error["param"], answer.error["code"]) == (param, code)


def test_a_failure_of_one_input_is_the_error_of_all(server: LiveServer) -> None:
    server.backend.refuse_with = server.backend.fail_with
    answer = server.post("/v1/embeddings", {"input": ["a", "b"]})
    assert (answer.status, answer.error["message"]) == (500, "the worker gave up")
