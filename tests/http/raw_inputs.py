"""Bad inputs below HTTP: bytes at the port, and the statuses that may come back before the connection is closed."""

import gzip
from typing import NamedTuple

AUTH = b"Host: localhost\r\nConnection: close\r\nAuthorization: Bearer user-key\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + AUTH + b"Content-Type: application/json\r\n"
GET = b"GET / HTTP/1.1\r\n" + AUTH
BODY = b'{"prompt":"a","max_tokens":1}'
BOMB = gzip.compress(b" " * 50 * 2**20)
NO_KEY = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class RawRow(NamedTuple):
    """`statuses` are those that may be answered; what is sent holds the word secret where it must not be echoed."""

    id: str
    data: bytes
    statuses: tuple[int, ...] = (400,)


def headers(number: int) -> bytes:
    return b"".join(b"X-%d: secret\r\n" % each for each in range(number))


def chunks(size: int, number: int) -> bytes:
    return (b"%x\r\n" % size + b" " * size + b"\r\n") * number + b"0\r\n\r\n"


def encoded(coding: bytes, body: bytes) -> bytes:
    return POST + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (coding, len(body)) + body


RAW_ROWS = [
    RawRow("B51", GET + b"X: secret" + b"y" * 9000 + b"\r\n\r\n", (431,)),
    RawRow("B51", b"GET /secret" + b"y" * 9000 + b" HTTP/1.1\r\n" + AUTH + b"\r\n", (431,)),
    RawRow("B52", GET + headers(1000) + b"\r\n", (400, 431)),
    RawRow("B52", GET + headers(10_000) + b"\r\n", (400, 431)),
    RawRow("B54", POST + b"Content-Length: %d\r\n\r\n" % (5 * 2**30), (413,)),
    RawRow("B54", POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(2**16, 128), (413,)),
    RawRow("B55", POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(1, 200_000)),
    RawRow("B56", encoded(b"gzip", b"garbage")),
    RawRow("B56", encoded(b"deflate", b"garbage")),
    RawRow("B56", encoded(b"gzip", BOMB), (413,)),
    RawRow("B56", encoded(b"br", b"garbage"), (415,)),
    RawRow("B57", POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + headers(10_000) + b"\r\n", (400, 431)),
    RawRow("B58", POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    RawRow("B58", POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"),
    *[RawRow("B58", POST + b"Content-Length: %b\r\n\r\n" % length) for length in (b"-1", b"abc", b"1e3", b"+5", b"5 5")],
    RawRow("B58", POST + b"Transfer-Encoding: xchunked\r\n\r\n"),
    RawRow("B58", GET + b"X: a\r\n secret\r\n\r\n", (200, 400)),  # a folded header: taken as one, or refused
    RawRow("B58", b"GET / HTTP/1.1\nHost: localhost\n\n\r\n\r\n"),
    RawRow("B58", GET + b"X: secret\x00\r\n\r\n"),
    RawRow("B59", b"GET /health\r\n\r\n"),
    RawRow("B59", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03secret\r\n\r\n"),
    RawRow("B59", b"GET /health HTTP/1.1\r\n\r\n"),
    RawRow("B59", b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"),
    RawRow("B59", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *[RawRow("B60", b"POST %b HTTP/1.1\r\nHost: %b\r\n" % (target, host) + NO_KEY, (400, 401, 403, 404))
      for target, host in (
          (b"/v1/completions", b"a/../../health?"), (b"/v1/completions", b"x/metrics#"),
          (b"http://x/v1/completions", b"localhost"), (b"http://localhost/health/../v1/completions", b"localhost"),
          (b"http://localhost/v1/completions", b"localhost"))],
    RawRow("B63", POST + b"Expect: magic\r\nContent-Length: 2\r\n\r\n{}", (417,)),
    RawRow("B64", b"CONNECT localhost:80 HTTP/1.1\r\n" + AUTH + b"\r\n", (400, 404, 405)),
    RawRow("B64", b"* / HTTP/1.1\r\n" + AUTH + b"\r\n", (400, 404, 405)),
]  # fmt: skip
