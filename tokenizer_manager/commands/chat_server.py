"""The server that `millstream chat MODEL` starts for itself. As a module: a server that ends with its chat."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from ...common.config import child_environment
from ...common.process import signal_at_parent_death
from .. import serve_command
from .api_client import NoAnswer

READY = re.compile(r"ready in [\d.]+ s: (\S+)\n")
STOP_SECONDS = 10.0


@contextlib.contextmanager
def chat_server(model: str, serve_args: list[str]) -> Iterator[str]:
    """A server of the model on a free port: its URL. NoAnswer with its last words if it does not start."""
    command = [sys.executable, "-P", "-m", "millstream.tokenizer_manager.commands.chat_server", str(os.getpid())]
    flags = ["--model-path", model, "--log-level", "warning", *serve_args, "--host", "127.0.0.1", "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [*command, *flags],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the chat
        ) as process,
    ):
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()


def _wait_until_ready(process: "subprocess.Popen[str]", log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.fullmatch(line):
            return found[1]
    log.seek(0)
    last = log.read().rstrip().rpartition("\n")[2].removeprefix("millstream: error: ")
    raise NoAnswer(last or "the server did not start")


def main(argv: list[str]) -> int:
    """Serve until the process that started this one ends: its id, then the flags of `millstream serve`."""
    signal_at_parent_death(signal.SIGTERM, int(argv[0]))
    return serve_command.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
