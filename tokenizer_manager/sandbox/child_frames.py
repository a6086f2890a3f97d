"""What a killable child and its parent say to each other: length-prefixed msgpack frames, strictly in turn.

parent -> child   the setup      once
child -> parent   a reply        once: ready, or why the setup is no use
parent -> child   a request      any number of times
child -> parent   its reply
"""

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**28


class ChildSetup(msgspec.Struct, frozen=True):
    """The limits of one request; a child's own setup adds to it."""

    seconds: float
    memory_bytes: int


class ChildReply(msgspec.Struct, frozen=True, kw_only=True):
    """`error` says why there is no answer; a child's own reply adds to it."""

    error: str | None = None


def to_frame(message: msgspec.Struct) -> bytes:
    """A message as it goes through the pipe."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
