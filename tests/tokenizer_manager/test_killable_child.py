"""The process of templates and grammars: who waits for it, who is told what when it dies, and that it is replaced."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from millstream.tokenizer_manager.api_error import APIError
from millstream.tokenizer_manager.sandbox import killable_child
from millstream.tokenizer_manager.sandbox.killable_child import ChildDied, ChildTimeout, KillableChild
from tests.tokenizer_manager.echo_child import EchoReply, EchoRequest, EchoSetup

MODULE = "tests.tokenizer_manager.echo_child"
LIMIT = 60.0

Child = KillableChild[EchoReply]


@pytest.fixture(autouse=True)
def child_finds_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def child_of(module: str = MODULE, *, seconds: float = LIMIT, starts: bool = True) -> Child:
    return KillableChild(module, "echoes", EchoSetup(seconds, 2**28, starts), EchoReply)


async def say(child: Child, text: str) -> str:
    """The text of the answer."""
    return (await child.ask(EchoRequest(text))).text


@asynccontextmanager
async def ready_child(seconds: float = LIMIT) -> AsyncIterator[Child]:
    """One that has answered; afterwards its process is gone."""
    before = set(psutil.Process().children())
    child = child_of(seconds=seconds)
    try:
        assert await say(child, "a") == "a"
        yield child
    finally:
        child.close()
        await asyncio.sleep(0)
        assert set(psutil.Process().children()) <= before


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, LIMIT))
    gc.collect()  # what was left open or not looked at says so


def pid_of(child: Child) -> int:
    assert child.pid is not None
    return child.pid


async def stopped_turn(child: Child, text: str = "b") -> asyncio.Task[str]:
    """A request whose turn has begun, at a process that stands still."""
    os.kill(pid_of(child), signal.SIGSTOP)
    task = asyncio.create_task(say(child, text))
    await asyncio.sleep(0.02)
    return task


def test_who_leaves_before_its_turn_is_never_answered_and_a_turn_that_has_begun_is_finished() -> None:
    async def check() -> None:
        async with ready_child() as child:
            leaving = [await stopped_turn(child), *[asyncio.create_task(say(child, f"{i}")) for i in range(50)]]
            staying = asyncio.create_task(child.ask(EchoRequest("c")))
            await asyncio.sleep(0.02)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            os.kill(pid_of(child), signal.SIGCONT)
            reply = await staying
            assert (reply.text, reply.num_requests) == ("c", 3)
            assert all(task.cancelled() for task in leaving)

    run(check())


def test_a_turn_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killable_child, "TURN_SECONDS", 0.05)

    async def check() -> None:
        async with ready_child() as child:
            first = await stopped_turn(child)
            with pytest.raises(APIError) as caught:
                await say(child, "c")
            assert (caught.value.status, caught.value.code) == (503, "overloaded")
            assert "Retry-After" in caught.value.headers
            os.kill(pid_of(child), signal.SIGCONT)
            assert await first == "b"
            assert await say(child, "d") == "d"

    run(check())


@pytest.mark.parametrize("poison", ["abort", "memory"])
def test_a_request_that_ends_its_process_is_not_tried_again(poison: str) -> None:
    async def check() -> None:
        async with ready_child() as child:
            with pytest.raises(ChildDied):
                await say(child, poison)
            assert child.pid is None
            assert await say(child, "c") == "c"

    run(check())


def test_what_takes_too_long_is_tried_once_also_where_its_client_has_left(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with ready_child(seconds=0.3) as child:
            with pytest.raises(ChildTimeout):
                await say(child, "loop")
            assert child.pid is None
            assert await say(child, "b") == "b"
            leaving = asyncio.create_task(say(child, "loop"))
            await asyncio.sleep(0.05)
            leaving.cancel()
            assert await say(child, "c") == "c"

    run(check())
    assert "never retrieved" not in caplog.text


def test_a_process_that_was_killed_is_replaced_and_its_request_tried_again() -> None:
    async def check() -> None:
        async with ready_child() as child:
            asked = [await stopped_turn(child), *[asyncio.create_task(say(child, "b")) for _ in range(3)]]
            os.kill(pid_of(child), signal.SIGKILL)
            assert await asyncio.gather(*asked) == ["b"] * 4
            os.kill(pid_of(child), signal.SIGSEGV)  # between two turns, so that it is not the next one's fault
            await asyncio.to_thread(os.waitid, os.P_PID, pid_of(child), os.WEXITED | os.WNOWAIT)
            assert await say(child, "c") == "c"

    run(check())


def test_a_process_that_is_killed_again_and_again_is_no_fault_of_the_request() -> None:
    async def check() -> None:
        async with ready_child() as child:
            first = pid_of(child)
            asked = await stopped_turn(child)
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(LIMIT):
                while child.pid in (None, first) and not asked.done():  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.001)
            os.kill(pid_of(child), signal.SIGKILL)
            with pytest.raises(APIError, match="echoes has ended") as caught:
                await asked
            assert (caught.value.status, caught.value.code) == (503, "process_ended")
            assert await say(child, "c") == "c"

    run(check())


@pytest.mark.parametrize("cause", ["module", "setup", "fork"])
def test_a_process_that_can_not_start_is_no_fault_of_the_request(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        child = child_of("nothing" if cause == "module" else MODULE, starts=cause != "setup")
        if cause == "fork":
            monkeypatch.setattr(killable_child.sys, "executable", "/nothing")  # type: ignore[attr-defined]
        with pytest.raises(APIError) as caught:
            await say(child, "a")
        assert (caught.value.status, caught.value.code) == (503, "process_ended")
        child.close()

    run(check())


@pytest.mark.parametrize("num_turns", range(6))
def test_the_end_may_come_while_a_process_starts(num_turns: int) -> None:
    async def check() -> None:
        child = child_of()
        asked = asyncio.create_task(say(child, "a"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        child.close()
        await asyncio.wait([asked])
        assert asked.cancelled() or isinstance(asked.exception(), APIError)

    run(check())


def test_no_process_starts_after_the_end() -> None:
    async def check() -> None:
        async with ready_child() as child:
            asked = [await stopped_turn(child), *[asyncio.create_task(say(child, "c")) for _ in range(2)]]
            await asyncio.sleep(0)
            child.close()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(found[0], asyncio.CancelledError)
            assert all(isinstance(each, APIError) and each.status == 503 for each in found[1:])
            assert child.pid is None

    run(check())
