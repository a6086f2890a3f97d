"""Everything that a client can get wrong: its status, its code, and the field that it names."""

import json
from typing import Any

import pytest

from millstream.common.sampling_params import MAX_STOP_LEN
from tests.tokenizer_manager.live_server import CONTEXT_LEN, MAX_BODY_BYTES, VOCAB_SIZE, LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
HELLO = [{"role": "user", "content": "hi"}]

BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    *[({"temperature": value}, "temperature") for value in (-0.1, "hot", True, 2**21)],
    *[({"top_p": value}, "top_p") for value in (0, 1.0001, -1)],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, 2**63)],
    *[({"min_p": value}, "min_p") for value in (1.1, -0.1)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**63, "5", 1.5)],
    *[({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, 10**30)],
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    *[({"seed": value}, "seed") for value in (2**64, "a", 1.5)],
    *[({"stop": value}, "stop") for value in ([""], "", ["x"] * 33, "x" * (MAX_STOP_LEN + 1))],
    ({"stop": [None]}, "stop[0]"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    *[({"cache_salt": value}, "cache_salt") for value in ("", "x" * 257, 5)],
    ({"cache_salt": "a", "extra_key": "b"}, "extra_key"),
    ({"priority": 1}, "priority"),
    *[({"rid": value}, "rid") for value in ("a b", "x" * 129, "", 7)],
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": HELLO * 1025}, "messages"),
    ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens"),
    ({"chat_template_kwargs": {"forbidden": 1}}, "chat_template_kwargs"),
    *[({"n": value}, "n") for value in (0, 17, 5_000_000, 10**30, 1.5, "1", True)],
    *[
        ({"logit_bias": value}, "logit_bias")
        for value in ({"five": 1}, {"-1": 1}, {"257": 1}, {"5": 101}, {"5": 1, "05": 1})
    ],
    *[({"logit_bias": value}, "logit_bias") for value in ({str(i): 1 for i in range(301)}, [5])],
    ({"logit_bias": {"5": None}}, "logit_bias[...]"),
    *[({name: value}, name) for name in ("frequency_penalty", "presence_penalty") for value in (-2.01, 2.01, "x")],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 100.5)],
    *[({"bad_words": value}, "bad_words") for value in ([""], [" "], ["x"] * 65, ["x" * 5000], ["x" * 33], "x")],
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT_FIELDS)
def test_a_bad_chat_field_is_named(shared_server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = shared_server.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param


UNSUPPORTED: list[dict[str, Any]] = [
    *[{"best_of": 2}, {"lora_path": "../x"}, {"custom_logit_processor": "80"}, {"chat_template": "{{7*7}}"}],
    *[{"functions": [{}]}, {"use_beam_search": True}, {"prompt_logprobs": 1}],
    *[{"truncate_prompt_tokens": 5}, {"return_hidden_states": True}],
    *[{"modalities": ["audio"]}, {"audio": {}}, {"echo": True}, {"return_token_ids": True}, {"web_search_options": {}}],
]


@pytest.mark.parametrize("fields", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(shared_server: LiveServer, fields: dict[str, Any]) -> None:
    answer = shared_server.post(CHAT, {"messages": HELLO, **fields})
    assert answer.status == 400
    assert answer.error["param"] == next(iter(fields))
    assert answer.error["code"] == "unsupported_parameter"


def test_neutral_values_of_unsupported_fields_and_unknown_fields_are_taken(shared_server: LiveServer) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "auto",
        "foo": {"bar": [1]},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "user": "me",
    }
    assert shared_server.post(CHAT, {"messages": HELLO, "max_tokens": 1, **neutral}).status == 200


BAD_PROMPTS: list[tuple[Any, str, str]] = [
    *[(value, "prompt", "empty_prompt") for value in ("", [], [[]], ["a", ""], [[1], []])],
    *[
        (value, "prompt", "token_out_of_range")
        for value in ([-1], [VOCAB_SIZE], [2**63], [10**40], [[1], [VOCAB_SIZE]])
    ],
    ([1.5], "prompt[0]", "invalid_type"),
    ([True], "prompt[0]", "invalid_type"),
    ([1, "a"], "prompt", "invalid_type"),
    ([[[1]]], "prompt[0][0]", "invalid_type"),
    (["a"] * 129, "prompt", "invalid_value"),
    ([1] * CONTEXT_LEN, "prompt", "context_length_exceeded"),
    ("a" * (CONTEXT_LEN + 1), "prompt", "context_length_exceeded"),
    ("a" * 60_000, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("prompt", "param", "code"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(shared_server: LiveServer, prompt: Any, param: str, code: str) -> None:
    answer = shared_server.post(COMPLETIONS, {"prompt": prompt})
    assert answer.status == 400
    assert (answer.error["param"] or "", answer.error["code"]) == (param, code)
    if code == "context_length_exceeded":
        assert f"{CONTEXT_LEN} tokens" in answer.error["message"]


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"prompt_embeds": "aa"}])
def test_unsupported_completion_fields_are_named(shared_server: LiveServer, fields: dict[str, Any]) -> None:
    assert shared_server.post(COMPLETIONS, {"prompt": "a", **fields}).error["param"] == next(iter(fields))


BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "input_ids"),
    ({"text": ["a"] * 4097}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[1], [-5]]}, "input_ids"),
    ({"text": "a", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 2**63}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}, {"temperature": "x"}]}, "sampling_params[1].temperature"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": "a", "rid": ["x", "y z"]}, "rid[1]"),
    ({"text": "a", "image_data": ["x"]}, "image_data"),
]


@pytest.mark.parametrize(("body", "param"), BAD_GENERATE)
def test_a_bad_generate_field_is_named_and_nothing_of_the_batch_is_sent(
    shared_server: LiveServer, body: dict[str, Any], param: str
) -> None:
    before = len(shared_server.backend.received)
    answer = shared_server.post(GENERATE, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert len(shared_server.backend.received) == before


BAD_JSON: list[tuple[bytes, str]] = [
    (b'{"model":"echo","messages":', "invalid_json"),
    (b'{"messages":[]} x', "invalid_json"),
    (b"[]", "invalid_type"),
    (b"42", "invalid_type"),
    (b'"x"', "invalid_type"),
    (b"null", "invalid_type"),
    (b"\xef\xbb\xbf{}", "invalid_json"),
    ('{"messages":[]}'.encode("utf-16"), "invalid_json"),
    (b'{"messages":"\xff"}', "invalid_json"),
    (b'{"unknown":"\xff","messages":[]}', "invalid_json"),
    (b'{"messages":"\x00"}', "invalid_json"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_json"),
    (b'{"messages":[{"role":"user","content":"a\\ud800b"}]}', "invalid_json"),
    (b'{"messages":[{"role":"user","content":"\\udc00"}]}', "invalid_json"),
    (b'{"temperature":NaN}', "invalid_json"),
    (b'{"temperature":Infinity}', "invalid_json"),
    (b'{"temperature":1e400}', "invalid_type"),
    (b'{"temperature":' + b"9" * 5000 + b"}", "invalid_type"),
    (b'{"top_k":' + b"9" * 5000 + b"}", "invalid_type"),
    (b"[" * 60_000, "invalid_type"),
    (b'{"x":' + b"[" * 60_000, "json_too_deep"),
    (b'{"foo":' + b'{"a":' * 10_000, "json_too_deep"),
    (b"{}", "missing_field"),
]


@pytest.mark.parametrize(("body", "code"), BAD_JSON, ids=[f"body{index}" for index in range(len(BAD_JSON))])
def test_a_body_that_is_no_json_object_is_refused(shared_server: LiveServer, body: bytes, code: str) -> None:
    answer = shared_server.request("POST", CHAT, raw=body)
    assert answer.status == 400
    assert answer.error["code"] == code


def test_an_empty_body_is_refused(shared_server: LiveServer) -> None:
    answer = shared_server.request("POST", CHAT, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


def test_of_a_key_that_stands_twice_the_last_counts(shared_server: LiveServer) -> None:
    body = b'{"prompt":"zz","max_tokens":1,"prompt":"ab","max_tokens":2}'
    assert shared_server.request("POST", COMPLETIONS, raw=body).json["choices"][0]["text"] == "ab"


def test_an_escaped_nul_is_a_character_like_any_other(shared_server: LiveServer) -> None:
    answer = shared_server.post(COMPLETIONS, {"prompt": "\x00a", "max_tokens": 2})
    assert answer.json["choices"][0]["text"] == "\x00a"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model_is_a_404_that_lists_the_served_ones(shared_server: LiveServer, path: str) -> None:
    answer = shared_server.post(path, {"model": "nope", "messages": HELLO, "prompt": "a"})
    assert answer.status == 404
    assert (answer.error["type"], answer.error["code"]) == ("not_found_error", "model_not_found")
    assert "echo, org/echo" in answer.error["message"]


def test_another_content_type_is_a_415(shared_server: LiveServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = shared_server.request("POST", CHAT, raw=b"{}", headers={"Content-Type": kind})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    with_charset = {"Content-Type": "application/json; charset=utf-8"}
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    assert shared_server.request("POST", CHAT, raw=body, headers=with_charset).status == 200


def test_a_body_over_the_limit_is_a_413(shared_server: LiveServer) -> None:
    answer = shared_server.request("POST", CHAT, raw=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(shared_server: LiveServer) -> None:
    unknown = shared_server.request("GET", "/nope")
    assert (unknown.status, unknown.error["code"]) == (404, "route_not_found")
    wrong = shared_server.request("GET", CHAT)
    assert (wrong.status, wrong.error["code"], wrong.headers["Allow"]) == (405, "method_not_allowed", "POST")
    for method in ("DELETE", "PATCH", "TRACE", "OPTIONS"):
        assert shared_server.request(method, "/metrics").status == 405


@pytest.mark.parametrize("label", ["x" * 129, "a b", "a/b", "\u00fc"])
def test_a_request_id_that_could_not_stand_in_a_log_is_refused(shared_server: LiveServer, label: str) -> None:
    answer = shared_server.request("POST", CHAT, {"messages": HELLO}, {"X-Request-Id": label})
    assert (answer.status, answer.error["code"]) == (400, "invalid_request_id")
    assert answer.headers["X-Request-Id"] != label


def test_every_answer_carries_a_request_id(shared_server: LiveServer) -> None:
    for method, path in (("GET", "/"), ("GET", "/nope"), ("POST", CHAT), ("GET", "/metrics")):
        assert len(shared_server.request(method, path).headers["X-Request-Id"]) == 24


def test_unexpected_exceptions_tell_nothing_of_the_inside(server: LiveServer) -> None:
    def explode(message: object) -> None:
        raise RuntimeError("secret /home/path 0xdeadbeef")

    server.manager._send = explode
    answer = server.post(CHAT, {"messages": HELLO})
    assert answer.status == 500
    assert (answer.error["type"], answer.error["code"]) == ("server_error", "internal_error")
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [-1]]}, "tokens"),
        ("/detokenize", {"tokens": [1, [1]]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": 5}, "rid"),
    ],
)
def test_the_other_routes_name_the_field_too(shared_server: LiveServer, path: str, body: Any, param: str) -> None:
    answer = shared_server.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
