"""A killable child that says what it is told, or does it: run as `python -m tests.tokenizer_manager.echo_child`."""

import os

import msgspec

from millstream.tokenizer_manager.sandbox.child_frames import ChildReply, ChildSetup
from millstream.tokenizer_manager.sandbox.killable_process import answer_until_closed, die_with_parent, read_message


class EchoSetup(ChildSetup, frozen=True):
    """`starts` is false for a child that does not get ready."""

    starts: bool = True


class EchoRequest(msgspec.Struct, frozen=True):
    """A text to say, or "loop", "abort", "memory"."""

    text: str


class EchoReply(ChildReply, frozen=True, kw_only=True):
    """What was said, and how many requests this process has had."""

    text: str = ""
    num_requests: int = 0


class Echo:
    """What the child does."""

    def __init__(self) -> None:
        self._num_requests = 0

    def ready(self, setup: EchoSetup) -> ChildReply:
        """Or not."""
        if not setup.starts:
            os.abort()
        return ChildReply()

    def answer(self, setup: EchoSetup, request: EchoRequest) -> EchoReply:
        """Say it, or do it."""
        self._num_requests += 1
        if request.text == "abort":
            os.abort()
        if request.text == "memory":
            bytearray(2 * setup.memory_bytes)
        while request.text == "loop":
            pass
        return EchoReply(text=request.text, num_requests=self._num_requests)


def main() -> None:
    """Until end-of-file."""
    die_with_parent("ms:echo")
    echo = Echo()
    answer_until_closed(read_message(EchoSetup), EchoRequest, echo.ready, echo.answer)


if __name__ == "__main__":
    main()
