"""`millstream chat`: talk to a model in the terminal; to a running server, or to one that it starts itself."""

import argparse
import asyncio
import contextlib
import importlib
import sys
import time
from typing import Any

from ...common.config import process_environment
from .api_client import NoAnswer, first_model
from .chat_client import Answer, Conversation, stream_answer
from .chat_server import chat_server
from .terminal_text import printable

HELP = """/system TEXT  begin anew with this system prompt (without TEXT: with none)
/reset        begin anew
/stats        what the answers so far took
/help         this
/exit         end (or Ctrl-D); Ctrl-C stops an answer"""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
OWN_KEY = "MILLSTREAM_API_KEY"  # of the server that is started here too


def main(argv: list[str]) -> int:
    """Talk until the end of the input; 1 if the server can't be asked or an answer failed, 2 for a bad command line."""
    options, serve_args = _parse(argv)
    try:
        with contextlib.ExitStack() as stack:
            if options.model_path is not None:
                _say(f"starting a server for {options.model_path} ...")
                options.base_url = stack.enter_context(chat_server(options.model_path, serve_args))
                options.api_key = options.api_key or process_environment().get(OWN_KEY, "").split(",")[0]
            base_url = options.base_url.rstrip("/")
            name = options.model or asyncio.run(first_model(base_url, options.api_key))
            return Chat(base_url, name, options).run()
    except NoAnswer as error:
        print(f"millstream chat: error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


class Chat:
    """One conversation at a terminal, or over a pipe: then answers alone go to standard output."""

    def __init__(self, base_url: str, name: str, options: argparse.Namespace) -> None:
        self._base_url = base_url
        self._options = options
        self._name = name
        self._conversation = Conversation(options.system)
        self._answers: list[Answer] = []
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._has_failed = False

    def run(self) -> int:
        """Read lines until the end; returns the exit code."""
        if self._is_terminal:
            importlib.import_module("readline")  # so that input() edits and remembers lines
            _say(f"{self._name} at {self._base_url}; /help lists commands")
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
            except EOFError:
                break
            if line == "/exit":
                break
            if line.startswith("/"):
                self._obey(*line.partition(" ")[::2])
            elif line:
                self._ask(line)
        return int(self._has_failed and not self._is_terminal)

    def _obey(self, command: str, text: str) -> None:
        if command == "/reset":
            self._conversation = Conversation(self._conversation.system)
        elif command == "/system":
            self._conversation = Conversation(text.strip())
        elif command == "/stats":
            _say("\n".join(answer.summary() for answer in self._answers) or "no answers yet")
        elif command == "/help":
            _say(HELP)
        else:
            _say(f"{command} is no command; /help lists them")

    def _ask(self, text: str) -> None:
        answer = Answer(time.monotonic())
        stopped = ""
        try:
            asyncio.run(self._stream(text, answer))
        except NoAnswer as error:
            self._has_failed = True
            self._end_line(answer)
            _say(f"error: {printable(str(error))}")
            return
        except KeyboardInterrupt:
            stopped = "stopped; "
        self._end_line(answer)
        self._conversation.keep(text, answer.content)
        self._answers.append(answer)
        _say(f"[{stopped}{answer.summary()}]")

    async def _stream(self, text: str, answer: Answer) -> None:
        body: dict[str, Any] = {"model": self._name, "messages": self._conversation.messages(text)}
        for field in ("temperature", "max_tokens", "seed"):
            if (value := getattr(self._options, field)) is not None:
                body[field] = value
        stream = stream_answer(self._base_url, body, answer, self._options.api_key)
        async with contextlib.aclosing(stream) as pieces:  # type: ignore[type-var]
            async for reasoning, content in pieces:
                if reasoning and self._is_terminal:
                    _write(DIM + printable(reasoning, keep_lines=True) + PLAIN)
                if content:
                    _write(printable(content, keep_lines=True))

    def _end_line(self, answer: Answer) -> None:
        if answer.num_events:
            _write("\n")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(text: str) -> None:
    """Something that is no answer."""
    print(text, file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="millstream chat",
        usage="millstream chat [options] [MODEL [flags of millstream serve]]",
        allow_abbrev=False,
        description="Talk to a model in the terminal. With MODEL a server is started for it, and ends with the chat.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_path", nargs="?", metavar="MODEL", help="as in millstream serve MODEL")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="a running server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="a model of that server (default: the first that it lists)")
    parser.add_argument("--api-key", metavar="KEY", help="a key of the server")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt to begin with")
    parser.add_argument("--temperature", type=float, help="of sampling (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--seed", type=int, help="the same answers each time")
    options, serve_args = parser.parse_known_args(argv)
    if serve_args and (options.model_path is None or argv.index(serve_args[0]) < argv.index(options.model_path)):
        parser.error(f"unknown argument {serve_args[0]}; flags of millstream serve go behind a MODEL")
    return options, serve_args
