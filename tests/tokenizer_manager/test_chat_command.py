"""`millstream chat` against a live server: over a pipe, and at a terminal."""

import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from millstream.tokenizer_manager.commands.chat_command import main
from tests.e2e.server_process import environment, millstream
from tests.tokenizer_manager.live_server import LiveServer

SECONDS = 20.0


def talk(server: LiveServer, text: str, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["--base-url", server.url, *argv])


def test_over_a_pipe_answers_alone_are_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer() as server:
        lines = "hello\n\nagain\n/reset\nnew\n/system Be brief.\nlast\n/stats\n/nonsense\n/exit\nnever\n"
        assert talk(server, lines, monkeypatch, "--max-tokens", "4", "--system", "Be kind.") == 0
        captured = capsys.readouterr()
        assert captured.out == "s:Be\ns:Be\ns:Be\ns:Be\n"
        assert [request.sampling_params.max_new_tokens for request in server.backend.requests] == [4] * 4
    assert captured.err.count("[4 tokens, ") == 4
    assert captured.err.count("4 tokens, ") == 8, "and once more each in /stats"
    assert "/nonsense is no command" in captured.err


def test_a_conversation_goes_on_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer() as server:
        lines = "hello\nagain\n/reset\nnew\n/system Be brief.\nlast\n/system\nend\n"
        assert talk(server, lines, monkeypatch, "--max-tokens", "2", "--system", "Be kind.") == 0
        sent = server.backend.prompt_texts()
    assert sent == [
        "s:Be kind.\nu:hello\na:",
        "s:Be kind.\nu:hello\na:s:\nu:again\na:",
        "s:Be kind.\nu:new\na:",
        "s:Be brief.\nu:last\na:",
        "u:end\na:",
    ]


def test_an_error_is_shown_and_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer() as server:
        assert talk(server, "x" * 400 + "\nhello\n", monkeypatch, "--max-tokens", "2") == 1
        assert server.backend.prompt_texts() == ["u:hello\na:"]
    captured = capsys.readouterr()
    assert "error: The context is 300 tokens" in captured.err
    assert captured.out == "u:\n"


def test_what_would_steer_the_terminal_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer() as server:
        assert talk(server, "\x1b[2Jx\n", monkeypatch, "--max-tokens", "7") == 0
    assert capsys.readouterr().out == "u:?[2Jx\n"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--base-url", "http://127.0.0.1:1"), 1, "http://127.0.0.1:1 cannot be reached"),
        (("--page-size", "8"), 2, "unknown argument --page-size; flags of millstream serve go behind a MODEL"),
        (("smollm2", "--page-sise", "8"), 1, "unknown argument --page-sise; did you mean --page-size?"),
        (("/nowhere",), 1, "--model-path /nowhere: no such directory"),
    ],
)
def test_a_start_that_fails_is_one_line(argv: tuple[str, ...], code: int, message: str) -> None:
    done = millstream("chat", *argv)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


class Terminal:
    """`millstream chat` at a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._fd, theirs = pty.openpty()
        command = [sys.executable, "-P", "-m", "millstream", "chat", "--base-url", url]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, text: str) -> None:
        """Read until `text` has come."""
        deadline = time.monotonic() + SECONDS
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            self.text += os.read(self._fd, 4096).decode(errors="replace")

    def wait_for_prompt(self) -> None:
        """Read until it waits for a line: only then does end-of-file count."""
        while not self.text.endswith("> "):
            self.text += os.read(self._fd, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        """As from the keyboard; what has come before is forgotten."""
        self.text = ""
        os.write(self._fd, text.encode())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on() -> None:
    with LiveServer() as server:
        server.backend.step_seconds = 0.05
        terminal = Terminal(server.url)
        try:
            terminal.wait_for("> ")
            terminal.type("hello\n")
            terminal.wait_for("u:hel")
            os.kill(terminal.process.pid, signal.SIGINT)
            terminal.wait_for("[stopped; ")
            terminal.wait_for("> ")
            server.until(lambda: server.backend.num_running == 0)
            server.backend.step_seconds = 0.0
            terminal.type("again\n")
            terminal.wait_for("tokens/s, first after")
            assert "u:hello\r\na:u:hel" in terminal.text, "the part that came was kept"
            terminal.wait_for_prompt()
            terminal.type("\x04")
            assert terminal.process.wait(SECONDS) == 0
        finally:
            terminal.close()
