"""The command line: `millstream COMMAND ...`. It only dispatches; each command imports what it needs."""

import importlib
import os
import signal
import sys

from . import __version__
from .common.did_you_mean import did_you_mean

COMMANDS = {
    "serve": ("millstream.tokenizer_manager.serve_command:main", "serve a model over HTTP"),
    "chat": ("millstream.tokenizer_manager.commands.chat_command:main", "talk to a model in the terminal"),
    "top": (
        "millstream.tokenizer_manager.commands.top_command:main",
        "watch the requests and figures of a running server",
    ),
    "doctor": ("millstream.tokenizer_manager.commands.doctor_command:main", "check this machine, and say what to mend"),
    "explain": (
        "millstream.tokenizer_manager.commands.explain_command:main",
        "show what became of a request, and why it waited",
    ),
    "replay": (
        "millstream.scheduler.recording.replay_command:main",
        "check a recorded schedule against this scheduler",
    ),
    "simulate": (
        "millstream.scheduler.simulation.simulate_command:main",
        "try policies on a load in virtual time",
    ),
    "kernels": ("millstream.tp_worker.kernels_command:main", "show which version of each operator runs here"),
    "bench": ("millstream.tokenizer_manager.commands.bench_command:main", "measure a running OpenAI-compatible server"),
}


def usage() -> str:
    lines = [f"  {name:<8} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: millstream COMMAND [options]",
            "",
            *lines,
            "",
            "`millstream COMMAND --help` shows a command's options.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (2 for a wrong command line)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"millstream {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"millstream: unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}\n{usage()}", file=sys.stderr)
        return 2
    module_name, function_name = COMMANDS[argv[0]][0].split(":")
    try:
        command = getattr(importlib.import_module(module_name), function_name)
        return int(command(argv[1:]))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 128 + signal.SIGPIPE


def _nobody_reads() -> bool:
    """Whether our output goes to a pipe that nobody reads any more; then it goes nowhere, as flushing it would fail again."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
