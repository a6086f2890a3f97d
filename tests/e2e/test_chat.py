"""`millstream chat MODEL`: a server of its own, from the first word to its end."""

import subprocess
import sys

import psutil

from tests.e2e.server_process import environment, wait_until


def chat(*flags: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "millstream", "chat", *flags]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    )


def children(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_starts_a_server_that_answers_and_ends_with_the_chat() -> None:
    with chat("--temperature", "0", "smollm2", "--max-total-tokens", "5000") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"What is the capital of France?\n")
            process.stdin.flush()
            assert b"Paris" in process.stdout.readline()
            processes = children(process)
            assert len(processes) >= 4
            process.stdin.close()
            assert process.wait(20) == 0
            assert not [each for each in processes if runs(each)]
        finally:
            process.kill()


def test_a_chat_that_is_killed_leaves_no_server() -> None:
    with chat("smollm2") as process:
        wait_until(lambda: len(children(process)) >= 3, 30, "processes of the server")
        processes = children(process)
        process.kill()
    wait_until(lambda: not any(map(runs, processes)), 30, "processes of the server are left")
