"""What is done for a call before its requests are sent: it has a place in the queue, and the limits of time hold."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.tokenizer_manager.live_server import LineRenderer, LiveServer

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
UNSENT: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [65]}),
    ("/v1/messages/count_tokens", {"model": "echo", "messages": HELLO}),
]


class WaitingRenderer(LineRenderer):
    """Renders when it is told to."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()

    async def render(self, messages: Any, **options: Any) -> str:
        await self.may_go.wait()
        return await super().render(messages, **options)


@pytest.fixture
def waiting() -> WaitingRenderer:
    return WaitingRenderer()


@pytest.fixture
def slow(waiting: WaitingRenderer) -> Iterator[LiveServer]:
    """Two may wait, and their chats are not rendered."""
    with LiveServer(renderer=waiting, max_queued_requests=2) as live:
        yield live


@pytest.mark.parametrize(("path", "body"), UNSENT)
def test_what_needs_no_scheduler_has_its_place_too(path: str, body: dict[str, Any]) -> None:
    with LiveServer(max_queued_requests=2) as server:
        assert server.post(path, body).status == 200
        server.call(lambda: server.backend.report_load(1, num_queue_reqs=2))
        answer = server.post(path, body)
        assert (answer.status, "Retry-After" in answer.headers) == (429, True)


def test_a_chat_that_waits_for_its_prompt_counts_until_its_client_leaves(slow: LiveServer) -> None:
    paths = (("/v1/messages/count_tokens", UNSENT[3][1]), (CHAT, {"messages": HELLO}))
    calls = [slow.send("POST", path, body) for path, body in paths]
    slow.until(lambda: slow.manager._queue.num_reqs == 2)
    assert slow.post(*UNSENT[1]).status == 429
    for call in calls:
        call.close()
    slow.until(lambda: slow.manager._queue.num_reqs == 0)


@pytest.mark.parametrize(
    ("headers", "status", "code", "has_retry"),
    [
        ({"X-Request-Timeout-S": "0.05"}, 504, "request_timeout", False),
        ({"X-Request-Waiting-Timeout-S": "0.05", "X-Request-Timeout-S": "9"}, 503, "queue_timeout", True),
    ],
)
def test_a_calls_own_limits_hold_before_it_is_sent(
    slow: LiveServer, headers: Mapping[str, str], status: int, code: str, has_retry: bool
) -> None:
    answer = slow.post(CHAT, {"messages": HELLO, "stream": True}, headers)
    assert (answer.status, answer.error["code"], "Retry-After" in answer.headers) == (status, code, has_retry)
    assert "0.05 s" in answer.error["message"]
    assert slow.call(lambda: slow.manager._queue.num_reqs) == 0
    assert slow.metric("num_refused_requests_total", code=code) == 1


def test_the_servers_limits_hold_and_a_call_can_not_raise_them(waiting: WaitingRenderer) -> None:
    with LiveServer(renderer=waiting, request_waiting_timeout=0.05, request_timeout=5.0) as server:
        answer = server.post(CHAT, {"messages": HELLO}, {"X-Request-Waiting-Timeout-S": "60"})
        assert (answer.status, answer.error["code"]) == (503, "queue_timeout")


def test_from_the_moment_that_it_is_sent_the_scheduler_keeps_the_limits() -> None:
    with LiveServer(request_waiting_timeout=0.1) as server:
        server.backend.paused = True
        call = server.send("POST", CHAT, {"messages": HELLO, "max_tokens": 1})
        server.until(lambda: server.backend.num_running == 1)
        asyncio.run(asyncio.sleep(0.2))
        server.call(server.backend.resume)
        with call, call.getresponse() as response:
            assert response.status == 200
