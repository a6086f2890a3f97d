"""The tokenizer manager in the server: ids, logs, seeds, load, long prompts."""

import logging
import threading
import time
from typing import Any

import openai
import pytest

from millstream.common.text_messages import BatchStrOutput, StrOutput
from millstream.tokenizer_manager.prompt_encoder import PromptEncoder
from tests.tokenizer_manager.live_server import CONTEXT_LEN, MODEL, LiveServer, byte_tokenizer

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]


def test_the_clients_id_is_in_the_rid_in_the_log_and_in_the_response(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer = server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1}, {"X-Request-Id": "mine-7"})
    assert answer.headers["X-Request-Id"] == "mine-7"
    rid = server.backend.requests[0].rid
    assert rid.startswith("mine-7-")
    assert any(f"request {rid}: length after" in record.message for record in caplog.records)


def test_without_a_clients_id_the_response_names_our_rid(server: LiveServer) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 1})
    assert answer.headers["X-Request-Id"] == server.backend.requests[0].rid
    assert answer.json["id"] == f"chatcmpl-{server.backend.requests[0].rid}"


def test_a_trace_goes_to_the_scheduler_if_it_is_one(server: LiveServer) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    for sent in (trace, "nonsense"):
        server.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1}, {"traceparent": sent})
    assert [request.traceparent for request in server.backend.requests] == [trace, None]


def test_the_same_random_seed_draws_the_same_seeds_for_requests() -> None:
    drawn = []
    for _ in range(2):
        with LiveServer() as other:
            other.post(CHAT, {"messages": HELLO, "max_tokens": 1})
            drawn.append(other.backend.requests[0].sampling_params.seed)
    assert drawn[0] == drawn[1]


def test_a_link_that_is_full_refuses_new_work(server: LiveServer) -> None:
    server.manager._is_full = lambda: True
    answer = server.post(CHAT, {"messages": HELLO})
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert int(answer.headers["Retry-After"]) > 0


def test_an_output_for_nobody_is_logged_and_dropped(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.call(lambda: server.manager.on_message(BatchStrOutput([StrOutput("ghost", "x", b"", None)])))
    assert "request ghost:" in caplog.text
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status == 200


def test_the_openai_client_raises_on_an_error_inside_a_stream(server: LiveServer) -> None:
    server.backend.fail_after = 2
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the worker gave up"):
            list(stream)


def test_a_connection_is_kept_after_streams_and_errors(server: LiveServer) -> None:
    connection, response = server.open("POST", CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True})
    with connection:
        response.read()
        opened = connection.sock
        for body, status in ((b"{", 400), (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1}', 200)):
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            with connection.getresponse() as again:
                assert again.status == status
                again.read()
            assert connection.sock is opened


def test_many_requests_at_once_all_get_their_own_answer(server: LiveServer) -> None:
    texts = [f"prompt {number} " for number in range(40)]
    connections = [
        server.send("POST", "/v1/completions", {"prompt": text, "max_tokens": 20, "stream": number % 2 == 0})
        for number, text in enumerate(texts)
    ]
    for text, connection in zip(texts, connections, strict=True):
        with connection, connection.getresponse() as response:
            body = response.read().decode()
        if body.startswith("data:"):
            pieces = [part.split('"text":"')[1].split('"')[0] for part in body.split("\n\n") if '"text":"' in part]
            assert "".join(pieces) == (text * 3)[:20]
        else:
            assert f'"text":"{(text * 3)[:20]}"' in body


def test_the_loop_answers_others_while_a_long_text_is_tokenized(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    encode = server.manager.encoder.tokenizer.encode_batch

    def slow_encode(texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        begun.set()
        assert go_on.wait(5)
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(server.manager.encoder.tokenizer, "encode_batch", slow_encode)
    with server.send("POST", "/tokenize", {"prompt": "a" * 20_000}) as waiting:
        assert begun.wait(5)
        begin = time.monotonic()
        assert server.request("GET", "/livez").status == 200
        assert time.monotonic() - begin < 4
        go_on.set()
        with waiting.getresponse() as response:
            assert b'"count":20000' in response.read()


def test_a_text_that_no_tokenizing_could_make_fit_is_not_tokenized(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: PromptEncoder, texts: Any, *, add_special_tokens: bool) -> list[list[int]]:
        raise AssertionError

    monkeypatch.setattr(PromptEncoder, "encode", never)
    answer = server.post("/v1/completions", {"prompt": "a" * 60_000})
    assert answer.error["code"] == "context_length_exceeded"
    longest = max(len(byte_tokenizer().decode([token_id], skip_special_tokens=False)) for token_id in range(257))
    assert f"at least {60_000 // longest} tokens" in answer.error["message"]
    assert f"{CONTEXT_LEN} tokens" in answer.error["message"]
