"""What arrives at the port without being a request: answered in JSON, closed, and never echoed."""

import json
import socket
import time

import pytest

from millstream.tokenizer_manager import http_server, json_body
from tests.tokenizer_manager.live_server import MAX_BODY_BYTES, LiveServer

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def talk(server: LiveServer, data: bytes) -> bytes:
    """Send bytes and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(data)
        answer = b""
        try:
            while piece := client.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


def error_of(answer: bytes) -> tuple[int, str]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"application/json" in head
    assert b"secret" not in answer
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(head.split()[1]), error["code"]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /health\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03secret\r\n\r\n", 400, "invalid_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization secret\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: secret\x00\r\n\r\n", 400, "invalid_http"),
        (POST + b"Content-Length: -1\r\nX: secret\r\n\r\n", 400, "invalid_http"),
        (POST + b"Content-Length: 1e3\r\n\r\n", 400, "invalid_http"),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", 400, "invalid_http"),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: secret" + b"y" * 9000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /secret" + b"y" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_what_is_not_http_gets_a_json_400_and_is_closed(
    shared_server: LiveServer, data: bytes, status: int, code: str
) -> None:
    assert error_of(talk(shared_server, data)) == (status, code)


def test_a_host_that_is_no_text_gets_the_index_page(shared_server: LiveServer) -> None:
    answer = talk(shared_server, b"GET / HTTP/1.1\r\nHost: a\xff\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_thousand_headers_are_refused(shared_server: LiveServer) -> None:
    headers = b"".join(b"X-%d: secret\r\n" % number for number in range(1000))
    status, _ = error_of(talk(shared_server, b"GET / HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n"))
    assert status in {400, 431}


def test_a_body_that_is_declared_too_large_is_refused_before_it_is_read(shared_server: LiveServer) -> None:
    answer = talk(shared_server, POST + b"Content-Length: %d\r\n\r\n" % (5 * 2**30))
    assert error_of(answer) == (413, "request_too_large")
    expecting = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (5 * 2**30)
    assert error_of(talk(shared_server, expecting)) == (413, "request_too_large")


def test_a_chunked_body_that_grows_too_large_is_refused(shared_server: LiveServer) -> None:
    chunks = b"".join(b"1000\r\n" + b" " * 4096 + b"\r\n" for _ in range(MAX_BODY_BYTES // 4096 + 1)) + b"0\r\n\r\n"
    answer = talk(shared_server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert error_of(answer) == (413, "request_too_large")


def test_a_body_that_is_not_what_its_encoding_says_is_refused(shared_server: LiveServer) -> None:
    answer = talk(
        shared_server, POST + b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 7\r\n\r\ngarbage"
    )
    assert error_of(answer)[0] == 400


def test_an_expectation_is_met_or_refused(shared_server: LiveServer) -> None:
    body = b'{"prompt":"a","max_tokens":1}'
    head = POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = talk(shared_server, head + body)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    nowhere = b"POST /nope HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n{}"
    assert error_of(talk(shared_server, nowhere)) == (417, "expectation_failed")
    bogus = POST + b"Expect: magic\r\nContent-Length: 2\r\n\r\n{}"
    assert error_of(talk(shared_server, bogus)) == (417, "expectation_failed")


def test_a_head_that_does_not_end_is_given_up(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    assert error_of(talk(server, b"GET / HTTP/1.1\r\nHost: secret")) == (408, "request_timeout")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_end_is_given_up(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "BODY_SECONDS", 0.2)
    assert error_of(talk(server, POST + b"Content-Length: 100\r\n\r\n{")) == (408, "request_timeout")
    promised = talk(server, POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
    begun, answer = promised.split(b"\r\n\r\n", 1)
    assert begun == b"HTTP/1.1 100 Continue"
    assert answer.startswith(b"HTTP/1.1 408")
    assert error_of(answer) == (408, "request_timeout")


def test_a_body_in_many_small_chunks_is_read_in_time(shared_server: LiveServer) -> None:
    body = b'{"prompt":"ab","max_tokens":1' + b" " * 40_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    begin = time.monotonic()
    answer = talk(shared_server, POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert time.monotonic() - begin < 3


def test_many_trailers_are_refused(shared_server: LiveServer) -> None:
    trailers = b"".join(b"X-%d: y\r\n" % number for number in range(10_000))
    answer = talk(shared_server, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
    assert error_of(answer)[0] in {400, 431}


def test_requests_in_a_row_on_one_connection_are_answered_in_order(shared_server: LiveServer) -> None:
    first = b'{"prompt":"a","max_tokens":1}'
    second = b'{"prompt":"b","max_tokens":1}'
    data = POST + b"Content-Length: %d\r\n\r\n" % len(first) + first
    data += POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(second) + second
    answer = talk(shared_server, data)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b'"text":"a"') < answer.index(b'"text":"b"')
