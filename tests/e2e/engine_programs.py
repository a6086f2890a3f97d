"""Programs that use an Engine as their users do, each in a process of its own: `python -m tests.e2e.engine_programs NAME`.

They print a line when the engine is ready. The fake worker stands in the ranks' place: everything else is real.
"""

import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import psutil

from millstream import Engine
from millstream.tokenizer_manager.api_error import APIError
from millstream.tokenizer_manager.children import Entries
from millstream.tokenizer_manager.engine_thread import EngineEnded
from tests.e2e.server_process import wait_until

LONG: dict[str, Any] = {"max_new_tokens": 4000, "ignore_eos": True}


def make(worker: str = "run_worker") -> Engine:
    """An engine over the fake worker."""
    engine = Engine("smollm2", entries=Entries(tp_worker=f"tests.e2e.fake_server:{worker}"))
    print("ready", flush=True)
    return engine


def forget_in_the_middle_of_a_stream() -> None:
    """The program ends without a word to the engine, with a request running."""
    engine = make("run_slow_worker")
    stream = engine.generate("x", LONG, stream=True)
    next(stream)


def fork_and_delete() -> None:
    """A fork has no engine. The last reference goes, and the program goes on."""
    engine = make()
    with warnings.catch_warnings(action="ignore"):  # Python's own, of threads
        pid = os.fork()
    if not pid:
        os._exit(0 if type(error_of(engine)) is EngineEnded else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert set(children()) == {"tp_worker.0", "scheduler", "detokenizer"}
    del engine
    assert not children()


def lose_a_child() -> None:
    """A process dies: the request that runs fails with the cause."""
    engine = make("run_slow_worker")
    threading.Timer(0.3, children()["scheduler"].kill).start()
    error = error_of(engine)
    assert type(error) is APIError
    assert "scheduler was killed by SIGKILL" in str(error)
    engine.shutdown()


def interrupt_and_use_after_the_end() -> None:
    """Ctrl-C in the middle of an answer: KeyboardInterrupt, and the engine answers on.

    Whoever waits when the engine ends gets an error, and so does whoever comes later.
    """
    engine = make("run_slow_worker")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert type(error_of(engine)) is KeyboardInterrupt
    wait_until(lambda: num_inflight(engine) == 0, 10, "the request is aborted")
    assert engine.generate("x", {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2
    threading.Timer(0.3, engine.shutdown).start()
    first, second = error_of(engine), error_of(engine)
    assert (type(first), type(second)) == (APIError, EngineEnded), (first, second)
    assert "it was shut down" in str(second)


def num_inflight(engine: Engine) -> int:
    """Requests at the scheduler."""
    return engine._thread._boot.manager.num_inflight


def error_of(engine: Engine) -> BaseException | None:
    """What comes of a long request."""
    try:
        engine.generate("x", LONG)
    except BaseException as error:
        return error
    return None


def wait_to_be_killed() -> None:
    """For SIGKILL."""
    engine = make()
    time.sleep(60)
    engine.shutdown()


def children() -> dict[str, psutil.Process]:
    """The processes that the engine has started, by name."""
    found = psutil.Process().children()
    return {process.cmdline()[-1]: process for process in found if "millstream.common.process" in process.cmdline()}


PROGRAMS = {
    each.__name__: each
    for each in (
        forget_in_the_middle_of_a_stream,
        fork_and_delete,
        lose_a_child,
        interrupt_and_use_after_the_end,
        wait_to_be_killed,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
