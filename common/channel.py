"""Channels: one-way links over Unix sockets in the private run directory. The only module that knows their transport.

A frame is a header (its body's length, the boot's instance id, the link's sequence number) and a msgpack body. Each link
has a socket of its own, bound by its receiver; its sender connects as soon as that is there. A foreign or undecodable
frame is counted, logged and dropped; a gap in our own sequence means that a message was lost, and raises. Senders never
block: what a socket does not take stays in a bounded deque, and `is_full` tells the loop to take no new work.

The loops read and write their sockets themselves: a hop wakes the receiver and nobody else. (ZeroMQ's I/O threads make
that four wake-ups a hop, on cores that the workers need.)
"""

import logging
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from .links import AnyMessage, Link

HEADER = struct.Struct("<IQQ")
MAX_PENDING = 4096
READ_BYTES = 64 * 1024  # of a link at a time, so that no link keeps the others waiting
CONNECT_MS = 10  # between attempts to reach a receiver that is not there yet

M = TypeVar("M")
logger = logging.getLogger(__name__)


class LostMessage(RuntimeError):
    """A sequence number is missing on a link: the server must end."""


class Sender:
    """The sending end of a link. It connects once: where the receiver goes, the server ends, and frames stay here."""

    def __init__(self, address: str, link: Link, instance_id: int) -> None:
        self.link = link
        self.socket: socket.socket | None = None
        self._address = address
        self._is_cut = False
        self._instance_id = instance_id
        self._sequence = 0
        self._pending: deque[memoryview] = deque()  # the first may be the rest of what was sent

    def send(self, *messages: AnyMessage) -> None:
        """Encode and send, or keep for `flush`; never blocks, never drops. Several at once wake the receiver once."""
        self.send_encoded(*[msgspec.msgpack.encode(message) for message in messages])

    def send_encoded(self, *bodies: bytes) -> None:
        """Send bodies that are encoded already (the same bytes go to every rank)."""
        frames = b"".join([self._next_header(body) + body for body in bodies])
        self._pending.append(memoryview(frames))
        self.flush()

    def flush(self) -> bool:
        """Hand waiting frames to the socket; whether none is left."""
        pending = self._pending
        if pending and self.socket is None:
            self._connect()
        while pending and self.socket is not None:
            frame = pending[0]
            try:
                num_sent = self.socket.send(frame)
            except BlockingIOError:
                return False
            except OSError:
                self.close()
                return False
            if num_sent < len(frame):
                pending[0] = frame[num_sent:]
                return False
            pending.popleft()
        return not pending

    @property
    def num_pending(self) -> int:
        """Sends that the socket has not taken whole yet."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether the loop must take no new work until the link drains."""
        return len(self._pending) >= MAX_PENDING

    @property
    def may_connect(self) -> bool:
        """Whether the receiver has not been there yet."""
        return self.socket is None and not self._is_cut

    def close(self) -> None:
        """Send nothing any more; what the socket has taken still arrives."""
        self._is_cut = True
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _next_header(self, body: bytes) -> bytes:
        self._sequence += 1
        return HEADER.pack(len(body), self._instance_id, self._sequence - 1)

    def _connect(self) -> None:
        if self._is_cut:
            return
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.setblocking(False)
        try:
            connected.connect(self._address)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connected.close()
        else:
            self.socket = connected


class _Connection:
    """What has come of a sender and is no whole frame yet."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.unread = bytearray()


class Receiver(Generic[M]):
    """The receiving end of a link: decodes one closed union."""

    def __init__(self, link: Link, instance_id: int, union: Any) -> None:
        self.link = link
        self.num_dropped = 0
        self._instance_id = instance_id
        self._sequence = 0
        self._decoder = msgspec.msgpack.Decoder(union)
        self._readable: dict[_Connection, None] = {}

    def on_readable(self, connection: _Connection) -> None:
        """`drain` will find something there."""
        self._readable[connection] = None

    def drain(self) -> list[M]:
        """The messages that `Hub.wait` has seen coming; never blocks. Raises LostMessage on a sequence gap.

        Of a link that is far behind this is a part; the next `wait` returns at once.
        """
        messages: list[M] = []
        for connection in self._readable:
            self._read(connection, messages)
        self._readable.clear()
        return messages

    def _read(self, connection: _Connection, messages: list[M]) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the sender has gone; whoever watches it will say so
            connection.socket.close()
            return
        connection.unread += data
        if not self._cut(connection.unread, messages):
            connection.socket.close()

    def _cut(self, unread: bytearray, messages: list[M]) -> bool:
        """Take the whole frames from the front. False for a foreign frame: nobody knows where it ends."""
        start = 0
        while len(unread) - start >= HEADER.size:
            size, instance_id, sequence = HEADER.unpack_from(unread, start)
            if instance_id != self._instance_id:
                self._drop("its instance id is not this boot's")
                return False
            body_start = start + HEADER.size
            if body_start + size > len(unread):
                break
            if sequence != self._sequence:
                raise LostMessage(f"link {self.link.name}: expected message {self._sequence}, got {sequence}")
            self._sequence += 1
            start = body_start + size
            try:
                messages.append(self._decoder.decode(unread[body_start:start]))
            except msgspec.MsgspecError as error:
                self._drop(str(error))
        del unread[:start]
        return True

    def _drop(self, why: str) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
            logger.warning("link %s: dropped frame number %d: %s", self.link.name, self.num_dropped, why)


class Hub:
    """All links of one process: opens them, waits on them, closes them."""

    def __init__(self, run_dir: Path, instance_id: int) -> None:
        self._run_dir = run_dir
        self._instance_id = instance_id
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[socket.socket, Callable[[], object]]] = {}  # by descriptor
        self._senders: list[Sender] = []
        self._receivers: list[Receiver[Any]] = []

    def open_sender(self, link: Link) -> Sender:
        """Connect to a link; its receiver may bind later."""
        sender = Sender(self._address(link), link, self._instance_id)
        self._senders.append(sender)
        return sender

    def open_receiver(self, link: Link, union: type[M] | Any) -> Receiver[M]:
        """Bind a link and decode the messages of `union` from it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address(link))
        listener.listen()
        receiver: Receiver[M] = Receiver(link, self._instance_id, union)
        self._receivers.append(receiver)
        self._watch(listener, partial(self._accept, listener, receiver))
        return receiver

    def wait(self, timeout_ms: int | None = None) -> None:
        """Flush what waits to be sent, then block until a message arrives, a full link takes more, or the timeout."""
        blocked = [sender for sender in self._senders if sender.num_pending and not sender.flush()]
        if any(sender.may_connect for sender in blocked):
            timeout_ms = CONNECT_MS if timeout_ms is None else min(timeout_ms, CONNECT_MS)
        full = [sender.socket for sender in blocked if sender.socket is not None]
        for each in full:
            self._epoll.register(each, select.EPOLLOUT)
        for descriptor, _ in self._epoll.poll(None if timeout_ms is None else timeout_ms / 1000):
            if descriptor in self._watched:
                _, on_readable = self._watched[descriptor]
                on_readable()
        for each in full:
            self._epoll.unregister(each)
        for sender in blocked:
            sender.flush()

    @property
    def file_descriptor(self) -> int:
        """What an event loop watches: readable as long as `wait` has something to return for."""
        return self._epoll.fileno()

    @property
    def is_full(self) -> bool:
        """Whether any sender's deque is full."""
        return any(sender.is_full for sender in self._senders)

    @property
    def num_pending(self) -> int:
        """Sends waiting in all senders."""
        return sum(sender.num_pending for sender in self._senders)

    @property
    def num_dropped(self) -> int:
        """Frames dropped by all receivers."""
        return sum(receiver.num_dropped for receiver in self._receivers)

    def close(self) -> None:
        """Close all sockets; frames that they have taken still arrive."""
        for sender in self._senders:
            sender.close()
        for readable, _ in self._watched.values():
            readable.close()
        self._epoll.close()

    def _accept(self, listener: socket.socket, receiver: Receiver[Any]) -> None:
        connected, _ = listener.accept()
        self._watch(connected, partial(receiver.on_readable, _Connection(connected)))

    def _watch(self, readable: socket.socket, on_readable: Callable[[], object]) -> None:
        readable.setblocking(False)
        self._watched[readable.fileno()] = readable, on_readable
        self._epoll.register(readable, select.EPOLLIN)

    def _address(self, link: Link) -> str:
        return str(self._run_dir / link.name)
