"""How much may wait: 429 before anything is tokenized, and when to come back."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from millstream.common.finish_reason import FINISH_ABORT
from millstream.common.messages import LoadSnapshot
from millstream.tokenizer_manager import prompt_encoder
from millstream.tokenizer_manager.api_error import APIError
from millstream.tokenizer_manager.metrics import Metrics
from millstream.tokenizer_manager.prompt_encoder import PromptEncoder
from millstream.tokenizer_manager.queue_bounds import QueueBounds
from tests.tokenizer_manager.live_server import MODEL, LiveServer

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    ("/v1/completions", {"prompt": "a"}),
    ("/generate", {"text": "a"}),
    (CHAT, {"messages": HELLO, "stream": True}),
]


@pytest.fixture
def small() -> Iterator[LiveServer]:
    """Ten requests and fifty tokens may wait; nothing is answered."""
    with LiveServer(max_queued_requests=10, max_queued_tokens=50) as live:
        live.backend.paused = True
        yield live


def load(
    queued: int, tokens: int = 0, *, started: int = 0, started_tokens: int = 0, paused: bool = False
) -> LoadSnapshot:
    return LoadSnapshot(
        *(1, 0, queued, 0, 0, 1000, 0.5, 0, 0, 0, 0, [], []),
        num_queue_tokens=tokens,
        started_reqs_total=started,
        started_tokens_total=started_tokens,
        is_paused=paused,
    )


def test_of_a_hundred_at_once_ten_wait_and_ninety_are_refused() -> None:
    with LiveServer(max_queued_requests=10) as server:
        server.backend.paused = True
        connections = [server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1}) for _ in range(100)]
        server.until(lambda: server.manager._queue._refused_reqs == 90)
        assert server.backend.num_running == 10
        server.call(server.backend.resume)
        statuses: Counter[int] = Counter()
        for connection in connections:
            with connection, connection.getresponse() as response:
                statuses[response.status] += 1
                response.read()
        assert statuses == {200: 10, 429: 90}
        assert len(server.backend.requests) == 10
        assert server.metric("http_responses_total", route=CHAT, status="4xx") == 90


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_full_queue_is_a_429_before_anything_is_tokenized(
    small: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: PromptEncoder, *args: Any, **options: Any) -> list[list[int]]:
        raise AssertionError

    monkeypatch.setattr(PromptEncoder, "prompt_ids", never)
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=10))
    answer = small.post(path, body)
    assert answer.status == 429
    assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "queue_full")
    assert "10 requests wait" in answer.error["message"]
    assert 1 <= int(answer.headers["Retry-After"]) <= 30
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=0, num_queue_tokens=50))
    answer = small.post(path, body)
    assert (answer.status, answer.error["code"]) == (429, "queue_full")
    assert "50 prompt tokens wait" in answer.error["message"]
    assert small.backend.requests == []


def test_a_batch_takes_as_many_places_as_it_has_prompts(small: LiveServer) -> None:
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=7))
    assert small.post("/v1/completions", {"prompt": ["a"] * 4}).status == 429
    assert small.post("/generate", {"text": ["a"] * 4}).status == 429
    assert small.metric("num_refused_requests_total", code="queue_full") == 8
    with small.send("POST", "/v1/completions", {"prompt": ["a"] * 3}):
        small.until(lambda: small.backend.num_running == 3)
        assert small.post("/v1/completions", {"prompt": "a"}).status == 429


def test_a_batch_that_could_never_wait_is_a_400(small: LiveServer) -> None:
    answer = small.post("/v1/completions", {"prompt": ["a"] * 11})
    assert (answer.status, answer.error["code"]) == (400, "batch_too_large")


def test_tokens_sent_since_the_last_snapshot_count_too(small: LiveServer) -> None:
    with small.send("POST", "/v1/completions", {"prompt": "a" * 40}):
        small.until(lambda: small.backend.num_running == 1)
        answer = small.post("/v1/completions", {"prompt": "b" * 11})
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert "40 prompt tokens wait, this call has 11" in answer.error["message"]
        with small.send("POST", "/v1/completions", {"prompt": "b" * 10}):
            small.until(lambda: small.backend.num_running == 2)
        small.until(lambda: small.backend.num_running == 1)
        small.call(lambda: small.backend.report_load(1, num_queue_reqs=0))
        with small.send("POST", "/v1/completions", {"prompt": "b" * 45}):
            small.until(lambda: small.backend.num_running == 2)


def test_a_prompt_longer_than_the_bound_is_taken_where_none_waits(small: LiveServer) -> None:
    with small.send("POST", "/v1/completions", {"prompt": "a" * 60}):
        small.until(lambda: small.backend.num_running == 1)
        assert small.post("/v1/completions", {"prompt": "b" * 60}).status == 429


def test_requests_that_have_ended_wait_no_more(small: LiveServer) -> None:
    small.call(small.backend.resume)
    for _ in range(30):  # all before the next snapshot
        assert small.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status == 200


def test_a_snapshot_counts_what_was_sent_before_it(small: LiveServer) -> None:
    waiting = [small.send("POST", CHAT, {"messages": HELLO}) for _ in range(6)]
    small.until(lambda: small.backend.num_running == 6)
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=4))
    waiting += [small.send("POST", CHAT, {"messages": HELLO}) for _ in range(6)]
    small.until(lambda: small.backend.num_running == 12)
    assert small.post(CHAT, {"messages": HELLO}).status == 429
    for connection in waiting:
        connection.close()


def test_the_schedulers_refusal_says_when_to_come_back_too(server: LiveServer) -> None:
    server.manager.clock = lambda: 100.0
    server.call(lambda: server.backend.report_load(1, started_reqs_total=0))
    server.manager.clock = lambda: 110.0
    server.call(lambda: server.backend.report_load(1, started_reqs_total=2))
    server.backend.refuse_with = FINISH_ABORT("full", 429, "QueueFull")
    told = [int(server.post(CHAT, {"messages": HELLO}).headers["Retry-After"]) for _ in range(3)]
    assert told == [5, 10, 15]


def test_what_is_being_tokenized_waits_too_whatever_snapshots_come(
    small: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(prompt_encoder, "INLINE_CHARS", 0)
    encode = small.manager.encoder.tokenizer.encode_batch

    def slow_encode(texts: Any, add_special_tokens: bool = True) -> list[list[int]]:
        begun.release()
        assert go_on.wait(5)
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(small.manager.encoder.tokenizer, "encode_batch", slow_encode)
    with small.send("POST", "/v1/completions", {"prompt": ["a"] * 10}):
        assert begun.acquire(timeout=5)
        small.call(lambda: small.backend.report_load(1, num_queue_reqs=0))
        assert small.post("/v1/completions", {"prompt": "a"}).status == 429
        go_on.set()
        small.until(lambda: small.backend.num_running == 10)


def test_a_call_that_fails_before_it_is_sent_gives_its_place_back(small: LiveServer) -> None:
    small.call(small.backend.resume)
    for _ in range(30):
        assert small.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"forbidden": 1}}).status == 400
    assert small.post(CHAT, {"messages": HELLO, "max_tokens": 1}).status == 200


def test_without_a_flag_eight_kv_caches_of_tokens_may_wait(server: LiveServer) -> None:
    server.call(lambda: server.backend.report_load(1, num_queue_tokens=3199, max_total_num_tokens=400))
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    server.call(lambda: server.backend.report_load(1, num_queue_tokens=3200, max_total_num_tokens=400))
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 429


def test_the_health_probe_is_not_refused_and_a_full_queue_is_no_illness(small: LiveServer) -> None:
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=10, num_queue_tokens=50))
    small.backend.refuse_with = FINISH_ABORT("full", 429, "QueueFull")
    small.call(small.backend.resume)
    assert small.request("GET", "/health_generate").status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "err_type", "code", "has_retry"),
    [
        (429, "QueueFull", "queue_full", True),
        (503, "QueueTimeout", "queue_timeout", True),
        (504, "RequestTimeout", "request_timeout", False),
        (500, "OutOfMemory", "out_of_memory", False),
    ],
)
def test_the_schedulers_refusals_have_the_same_shape(
    server: LiveServer, stream: bool, status: int, err_type: str, code: str, has_retry: bool
) -> None:
    server.backend.refuse_with = FINISH_ABORT("no room", status, err_type)
    for path, body in BODIES:
        answer = server.post(path, body | {"stream": stream})
        assert (answer.status, answer.error["code"], answer.error["message"]) == (status, code, "no room")
        assert answer.error["type"] == ("rate_limit_error" if status == 429 else "server_error")
        assert ("Retry-After" in answer.headers) == has_retry
    assert server.metric("num_refused_requests_total", code=code) == len(BODIES)


def test_an_end_in_a_stream_has_the_same_code(server: LiveServer) -> None:
    server.backend.fail_after = 2
    server.backend.fail_with = FINISH_ABORT("took too long", 504, "RequestTimeout")
    for path, body in BODIES:
        events = server.events(path, body | {"stream": True})
        assert events[-1]["error"] == {
            "message": "took too long",
            "type": "server_error",
            "param": None,
            "code": "request_timeout",
        }


def test_the_openai_client_takes_it_for_a_rate_limit(small: LiveServer) -> None:
    small.call(lambda: small.backend.report_load(1, num_queue_reqs=10))
    with (
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")


# ---- Retry-After ----------------------------------------------------------------------------------------------------


def full_bounds() -> QueueBounds:
    return QueueBounds(10, 100, Metrics(MODEL))


def refuse(bounds: QueueBounds, num_reqs: int = 1) -> int:
    with pytest.raises(APIError) as caught:
        bounds.enter("call", num_reqs)
    assert caught.value.status == 429
    return int(caught.value.headers["Retry-After"])


def test_each_refused_is_told_when_its_turn_could_come() -> None:
    bounds = full_bounds()
    bounds.on_load(load(10, started=100), 50.0)
    bounds.on_load(load(10, started=110), 55.0)  # two a second
    assert [refuse(bounds) for _ in range(5)] == [1, 1, 2, 2, 3]
    assert [refuse(bounds, 10) for _ in range(8)] == [8, 13, 18, 23, 28, 30, 30, 30]


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    bounds = full_bounds()
    for second in range(20):
        bounds.on_load(load(10, started=100 * min(second, 5)), float(second))
    assert refuse(bounds) == 30
    bounds.on_load(load(10, started=600), 20.0)
    assert refuse(bounds, 10) == 2  # 100 in ten seconds, and one that was refused before


def test_an_idle_time_before_the_queue_filled_does_not_slow_the_rate() -> None:
    bounds = full_bounds()
    for second in range(10):
        bounds.on_load(load(0), float(second))
    bounds.on_load(load(10, started=20), 11.0)
    assert refuse(bounds, 10) == 1


def test_while_the_rate_is_unknown_it_is_two_seconds_and_thirty_where_nothing_leaves() -> None:
    bounds = full_bounds()
    bounds.on_load(load(10), 0.0)
    assert refuse(bounds) == 2
    bounds.on_load(load(10), 0.9)
    assert refuse(bounds) == 2
    bounds.on_load(load(10), 5.0)
    assert refuse(bounds) == 30
    fast = full_bounds()
    fast.on_load(load(10, started=0), 0.0)
    fast.on_load(load(10, started=500, paused=True), 5.0)
    assert refuse(fast) == 30


def test_too_many_tokens_take_as_long_as_their_own_rate_says() -> None:
    bounds = full_bounds()
    bounds.on_load(load(5, 200, started=0, started_tokens=0), 0.0)
    bounds.on_load(load(5, 200, started=50, started_tokens=40), 2.0)  # twenty tokens a second, a hundred too many
    assert refuse(bounds) == 5


def test_nothing_is_left_of_calls_and_requests_that_came_and_went() -> None:
    bounds = full_bounds()
    for number in range(100):
        bounds.enter(f"call {number}", 2)
        bounds.check_tokens(f"call {number}", 20)
        bounds.leave(f"call {number}")
        for child in range(2):
            bounds.on_sent(f"{number}-{child}", 10)
        assert (bounds.num_reqs, bounds.num_tokens) == (2, 20)
        bounds.on_output(f"{number}-0")
        bounds.on_output(f"{number}-0")
        bounds.on_output(f"{number}-1")
    assert (bounds.num_reqs, bounds.num_tokens) == (0, 0)
