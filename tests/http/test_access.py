"""Keys, levels, hosts and origins: who gets in, and what those hear who do not."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests

from millstream.common.config import ServerArgs
from millstream.common.flags import ConfigError
from millstream.tokenizer_manager import access
from millstream.tokenizer_manager.access import Access, Level, load_access
from millstream.tokenizer_manager.routes import Route
from tests.tokenizer_manager.live_server import LiveServer

USER, OTHER, ADMIN = "user-key-1", "user-key-2", "admin-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
PUBLIC_PATHS = {"/", "/ui", "/livez", "/readyz", "/health", "/health_generate", "/metrics", "/openapi.json", "/version"}
ADMIN_PATHS = {"/flush_cache", "/pause_generation", "/continue_generation", "/debug/requests/{rid}"}
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "ab", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


KEYS: dict[str, Mapping[str, str]] = {
    "none": {},
    "wrong": bearer("user-key-3"),
    "user": bearer(USER),
    "admin": bearer(ADMIN),
}


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    """A server with two user keys and an admin key."""
    with LiveServer(http={"access": Access(api_keys=[USER, OTHER], admin_api_key=ADMIN)}) as server:
        yield server


def expected_status(level: Level, key: str) -> int | None:
    """401, 403, or None: let in."""
    if level is Level.PUBLIC or key == "admin":
        return None
    if key != "user":
        return 401
    return 403 if level is Level.ADMIN else None


def declared_methods(server: LiveServer) -> dict[str, set[str]]:
    """Every path that the running server knows, with its methods."""
    assert server.runner.app is not None
    found: dict[str, set[str]] = {}
    for route in server.runner.app.router.routes():
        assert route.resource is not None
        found.setdefault(route.resource.canonical, set()).add(route.method)
    return found


def test_every_route_and_method_lets_in_whom_its_level_says(locked: LiveServer) -> None:
    known = declared_methods(locked)
    assert known.keys() >= (PUBLIC_PATHS | ADMIN_PATHS | {COMPLETIONS, "/generate", "/server_info", "/v1/models"})
    wrong = []
    with requests.Session() as session:
        for (path, methods), method, (key, headers) in product(known.items(), METHODS, KEYS.items()):
            level = Level.PUBLIC if path in PUBLIC_PATHS else Level.ADMIN if path in ADMIN_PATHS else Level.USER
            url = locked.url + path.replace("{rid}", "x").replace("{id}", "x").replace("{id:.+}", "x")
            status = session.request(method, url, headers=headers, timeout=10).status_code
            expected = 405 if method not in methods else expected_status(level, key)
            refused = status if status in {401, 403, 405} else None
            if refused != expected:
                wrong.append((method, path, key, status, expected))
    assert not wrong
    locked.call(locked.backend.resume)


def test_a_route_that_declares_no_level_can_not_be_made() -> None:
    with pytest.raises(TypeError):
        Route("GET", "/new", None, "something new")  # type: ignore[call-arg,arg-type]


REFUSED_KEYS: list[Mapping[str, str]] = [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": f"Basic {USER}"},
    bearer(USER + "x"),
    bearer(USER[:-1]),
    bearer(USER.upper()),
    bearer(f"{USER} {USER}"),
    bearer("' OR '1'='1"),
    bearer("x" * 1000),
    {"Authorization": f"Bearer {USER}, Bearer {USER}"},
    {"x-api-key": USER.upper()},
    {"x-api-key": "\u00ff\u00fe"},
    {"Authorization": "Bearer wrong", "x-api-key": USER},
]


@pytest.mark.parametrize("headers", REFUSED_KEYS, ids=str)
def test_no_key_or_a_wrong_one_is_a_401(locked: LiveServer, headers: Mapping[str, str]) -> None:
    answer = locked.post(COMPLETIONS + "?api_key=" + USER, BODY, headers)
    assert answer.status == 401
    assert (answer.error["type"], answer.error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert USER.encode() not in answer.body


@pytest.mark.parametrize(
    "headers", [bearer(USER), {"x-api-key": OTHER}, {"authorization": f"bearer {OTHER}"}, bearer(ADMIN)]
)
def test_a_key_may_come_in_either_header(locked: LiveServer, headers: Mapping[str, str]) -> None:
    assert locked.post(COMPLETIONS, BODY, headers).status == 200


def test_two_authorization_headers_are_a_401(locked: LiveServer) -> None:
    with locked.send("GET", "/livez") as connection:
        connection.getresponse().read()
        connection.putrequest("GET", "/v1/models")
        connection.putheader("Authorization", f"Bearer {USER}")
        connection.putheader("Authorization", f"Bearer {USER}")
        connection.endheaders()
        assert connection.getresponse().status == 401


@pytest.mark.parametrize(
    "line",
    [
        "POST http://x/v1/completions",
        "POST http://x/health/../v1/completions",
        "POST //v1/completions",
        "POST /v1/%63ompletions",
        "POST /health/..%2fv1/completions",
        "POST /V1/completions",
        "POST /v1/completions/",
        "POST /v1/completions;a=b",
    ],
)
@pytest.mark.parametrize("host", ["x", "a/../../health?", "x/metrics#"])
def test_no_spelling_of_a_path_goes_around_the_keys(locked: LiveServer, line: str, host: str) -> None:
    with locked.send("GET", "/livez") as connection:
        connection.getresponse().read()
        assert connection.sock is not None
        body = b'{"prompt":"a","max_tokens":1}'
        head = (
            f"{line} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sock.sendall(head.encode() + body)
        assert connection.sock.recv(65536).split()[1] in {b"400", b"401", b"404"}


def test_keys_are_compared_in_constant_time_and_each_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = access.hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    with LiveServer(http={"access": Access(api_keys=[USER, OTHER], admin_api_key=ADMIN)}) as server:
        for key in (USER, OTHER, "u", "wrong" * 50):
            compared.clear()
            assert server.request("GET", "/v1/models", headers=bearer(key)).status == (
                200 if key in {USER, OTHER} else 401
            )
            assert len(compared) == 3
            assert {len(digest) for pair in compared for digest in pair} == {32}


def test_without_an_admin_key_admin_routes_are_closed_where_there_are_user_keys() -> None:
    with LiveServer(http={"access": Access(api_keys=[USER])}) as server:
        assert server.request("POST", "/flush_cache").status == 401
        answer = server.request("POST", "/flush_cache", headers=bearer(USER))
        assert (answer.status, answer.error["type"]) == (403, "permission_error")
        assert "--admin-api-key" in answer.error["message"]
        assert server.post("/abort_request", {"abort_all": True}, bearer(USER)).status == 403
        assert server.post("/abort_request", {"rid": "x"}, bearer(USER)).json == {"num_aborted": 0}


def test_with_an_admin_key_alone_user_routes_are_open() -> None:
    with LiveServer(http={"access": Access(admin_api_key=ADMIN)}) as server:
        assert server.post(COMPLETIONS, BODY).status == 200
        assert server.request("POST", "/flush_cache").status == 401
        assert server.request("POST", "/flush_cache", headers=bearer(ADMIN)).status == 200
        assert server.post("/abort_request", {"abort_all": True}).status == 403
        assert server.backend.requests[0].cache_salt is None


def test_a_user_ends_only_its_own_requests() -> None:
    with LiveServer(http={"access": Access(api_keys=[USER, OTHER], admin_api_key=ADMIN)}) as server:
        server.backend.paused = True
        for ender in (USER, ADMIN):
            with server.send("POST", COMPLETIONS, BODY | {"rid": "mine"}, bearer(USER)):
                server.until(lambda: server.backend.num_running == 1)
                assert server.post("/abort_request", {"rid": "mine"}, bearer(OTHER)).json == {"num_aborted": 0}
                assert server.post("/abort_request", {"rid": "mine"}, bearer(ender)).json == {"num_aborted": 1}
                server.until(lambda: server.manager.num_inflight == 0)


def test_two_tenants_may_use_one_id_at_once_and_each_finds_its_own() -> None:
    def explained(name: str) -> list[dict[str, Any]]:
        found = server.request("GET", f"/debug/requests/{name}", headers=bearer(ADMIN)).json
        return list(found.get("requests", [found]))

    named = BODY | {"rid": "job-1"}
    with LiveServer(http={"access": Access(api_keys=[USER, OTHER], admin_api_key=ADMIN)}) as server:
        server.backend.paused = True
        first, second = (server.send("POST", COMPLETIONS, named, bearer(key)) for key in (USER, OTHER))
        server.until(lambda: server.backend.num_running == 2)
        assert server.post(COMPLETIONS, named, bearer(OTHER)).error["code"] == "duplicate_request_id"
        rids = [request.rid for request in server.backend.requests]
        assert [each["rid"] for each in explained("job-1")] == rids
        assert server.post("/abort_request", {"rid": rids[0]}, bearer(OTHER)).json == {"num_aborted": 0}
        assert server.post("/abort_request", {"rid": "job-1"}, bearer(OTHER)).json == {"num_aborted": 1}
        with second, second.getresponse() as response:
            assert response.status == 499
        assert {each["rid"]: each["status"] for each in explained("job-1")} == {rids[0]: "running", rids[1]: "ended"}
        third = server.send("POST", COMPLETIONS, named, bearer(OTHER))  # its id is free again
        server.until(lambda: server.backend.num_running == 2)
        assert server.post("/abort_request", {"rid": "job-1"}, bearer(ADMIN)).json == {"num_aborted": 2}
        for connection in (first, third):
            with connection, connection.getresponse() as response:
                assert response.status == 499


def test_tenants_never_share_a_prefix_whatever_salts_they_send(locked: LiveServer) -> None:
    before = len(locked.backend.requests)
    for key, salt in product((USER, OTHER, ADMIN), ({}, {"cache_salt": "s"}, {"cache_salt": "t"})):
        assert locked.post(COMPLETIONS, BODY | salt, bearer(key)).status == 200
        assert locked.post(COMPLETIONS, BODY | salt, bearer(key)).status == 200
    salts = [request.cache_salt for request in locked.backend.requests[before:]]
    assert len(set(salts)) == 9
    assert salts[::2] == salts[1::2]
    assert not any(key in str(salt) for key, salt in product((USER, OTHER, ADMIN), salts))


HOSTS = {
    "localhost": 200,
    "127.0.0.1:30000": 200,
    "[::1]:5": 200,
    "LOCALHOST:1": 200,
    "a.localhost": 200,
    "127.9.9.9": 200,
    "known.example": 200,
    "evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "localhost.evil.example": 403,
    "1.2.3.4": 403,
    "a/../../health?": 403,
    "": 403,
}


def test_on_a_loopback_address_the_host_must_be_this_machine() -> None:
    with LiveServer(http={"access": Access(bound_to="127.0.0.1", allowed_hosts=["known.example"])}) as server:
        answers = {host: server.request("GET", "/v1/models", headers={"Host": host}) for host in HOSTS}
        assert {host: answer.status for host, answer in answers.items()} == HOSTS
        assert answers["evil.example"].error["code"] == "host_not_allowed"


def test_on_other_addresses_any_host_is_taken() -> None:
    with LiveServer(http={"access": Access(bound_to="0.0.0.0")}) as server:
        assert server.request("GET", "/livez", headers={"Host": "any.example"}).status == 200


def test_a_page_of_another_site_is_refused_and_hears_no_allowance(locked: LiveServer) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", locked.url.replace("//", "//evil")):
        headers = {"Origin": origin, **bearer(USER)}
        answer = locked.post(COMPLETIONS, BODY, headers)
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        asked = headers | {"Access-Control-Request-Method": "POST"}
        for refused in (answer, locked.request("OPTIONS", COMPLETIONS, headers=asked)):
            assert refused.status == 403
            assert not [name for name in refused.headers if name.lower().startswith("access-control")]
    own = {"Origin": locked.url, **bearer(USER)}
    assert locked.post(COMPLETIONS, BODY, own).status == 200


def test_a_page_of_an_allowed_site_is_told_so() -> None:
    site = "https://chat.example"
    with LiveServer(http={"access": Access(api_keys=[USER], allowed_origins=[site])}) as server:
        asked = {
            "Origin": site,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        preflight = server.request("OPTIONS", COMPLETIONS, headers=asked)
        assert (preflight.status, preflight.headers["Access-Control-Allow-Headers"]) == (204, "authorization")
        for answer in (
            preflight,
            server.post(COMPLETIONS, BODY, {"Origin": site, **bearer(USER)}),
            server.post(COMPLETIONS, BODY | {"stream": True}, {"Origin": site, **bearer(USER)}),
            server.post(COMPLETIONS, BODY, {"Origin": site}),
        ):
            assert answer.headers["Access-Control-Allow-Origin"] == site
        assert server.post(COMPLETIONS, BODY, {"Origin": "https://other.example", **bearer(USER)}).status == 403


BAD_KEYS: list[dict[str, Any]] = [
    {"api_key": ("",)},
    {"api_key": ("two words",)},
    {"api_key": ("\u00fc",)},
    {"api_key": ("x" * 513,)},
    {"admin_api_key": ""},
    {"api_key": ("same",), "admin_api_key": "same"},
    {"api_key_file": "/no/such/file"},
]


@pytest.mark.parametrize("flags", BAD_KEYS, ids=str)
def test_keys_that_could_not_work_are_refused_at_start(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="api-key"):
        load_access(ServerArgs(model_path="x", **flags), "127.0.0.1")


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of team one\nfirst\n\n  second\n")
    loaded = load_access(ServerArgs(model_path="x", api_key_file=str(path), api_key=("third",)), "127.0.0.1")
    with LiveServer(http={"access": loaded}) as server:
        statuses = [
            server.request("GET", "/v1/models", headers=bearer(key)).status for key in ("first", "second", "third", "#")
        ]
    assert statuses == [200, 200, 200, 401]
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_access(ServerArgs(model_path="x", api_key_file=str(path)), "127.0.0.1")
