"""Channels: ZeroMQ PUSH/PULL pairs over `ipc://` in the private run directory. The only module that knows ZeroMQ.

A frame is a 16-byte header (the boot's instance id, the link's sequence number) and a msgpack body. Each link has a
socket of its own, bound by its receiver. What is sent together travels as the parts of one ZeroMQ message: a hop costs
four wake-ups (ZeroMQ has an I/O thread on each side), however many frames it brings. A foreign or undecodable frame is counted, logged and dropped; a gap in our
own sequence means that a message was lost, and raises. Senders never block: what a socket does not take stays in a
bounded deque, and `is_full` tells the loop to take no new work.
"""

import logging
import os
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from .links import AnyMessage, Link

HEADER = struct.Struct("<QQ")
MAX_PENDING = 4096
SEND_HWM = 1000
RECEIVE_HWM = 1000

M = TypeVar("M")
logger = logging.getLogger(__name__)


class LostMessage(RuntimeError):
    """A sequence number is missing on a link: the server must end."""


class Sender:
    """The sending end of a link."""

    def __init__(self, socket: "zmq.Socket[bytes]", link: Link, instance_id: int) -> None:
        self.link = link
        self._socket = socket
        self._instance_id = instance_id
        self._sequence = 0
        self._pending: deque[list[bytes]] = deque()

    def send(self, *messages: AnyMessage) -> None:
        """Encode and send, or keep for `flush`; never blocks, never drops. Several at once wake the receiver once."""
        self.send_encoded(*[msgspec.msgpack.encode(message) for message in messages])

    def send_encoded(self, *bodies: bytes) -> None:
        """Send bodies that are encoded already (the same bytes go to every rank)."""
        self._pending.append([self._next_header() + body for body in bodies])
        self.flush()

    def flush(self) -> bool:
        """Hand waiting frames to the socket; whether none is left."""
        while self._pending:
            try:
                self._put(self._pending[0])
            except zmq.Again:
                return False
            self._pending.popleft()
        return True

    @property
    def num_pending(self) -> int:
        """Sends that the socket has not taken yet."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether the loop must take no new work until the link drains."""
        return len(self._pending) >= MAX_PENDING

    def _put(self, frames: list[bytes]) -> None:
        """All of them or none: zmq.Again."""
        for frame in frames[:-1]:
            self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frames[-1], zmq.NOBLOCK)

    def _next_header(self) -> bytes:
        self._sequence += 1
        return HEADER.pack(self._instance_id, self._sequence - 1)


class Receiver(Generic[M]):
    """The receiving end of a link: decodes one closed union."""

    def __init__(self, socket: "zmq.Socket[bytes]", link: Link, instance_id: int, union: Any) -> None:
        self.link = link
        self.num_dropped = 0
        self._socket = socket
        self._instance_id = instance_id
        self._sequence = 0
        self._decoder = msgspec.msgpack.Decoder(union)

    def drain(self, limit: int = 10_000) -> list[M]:
        """All messages that have arrived, up to `limit`; never blocks. Raises LostMessage on a sequence gap."""
        messages: list[M] = []
        for _ in range(limit):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # an exception would cost three times as much
                break
            message = self._decode(self._socket.recv(zmq.NOBLOCK))
            if message is not None:
                messages.append(message)
        return messages

    def _decode(self, frame: bytes) -> M | None:
        if len(frame) < HEADER.size:
            self._drop("it is shorter than a header")
            return None
        instance_id, sequence = HEADER.unpack_from(frame)
        if instance_id != self._instance_id:
            self._drop("its instance id is not this boot's")
            return None
        if sequence != self._sequence:
            raise LostMessage(f"link {self.link.name}: expected message {self._sequence}, got {sequence}")
        self._sequence += 1
        try:
            message: M = self._decoder.decode(memoryview(frame)[HEADER.size :])
        except msgspec.MsgspecError as error:
            self._drop(str(error))
            return None
        return message

    def _drop(self, why: str) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
            logger.warning("link %s: dropped frame number %d: %s", self.link.name, self.num_dropped, why)


class Hub:
    """All links of one process: opens them, waits on them, closes them."""

    def __init__(self, run_dir: Path, instance_id: int) -> None:
        self._run_dir = run_dir
        self._instance_id = instance_id
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._senders: list[Sender] = []
        self._receivers: list[Receiver[Any]] = []
        self._wake_fd: int | None = None

    def open_sender(self, link: Link) -> Sender:
        """Connect to a link; its receiver may bind later."""
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(self._address(link))
        sender = Sender(socket, link, self._instance_id)
        self._senders.append(sender)
        return sender

    def open_receiver(self, link: Link, union: type[M] | Any) -> Receiver[M]:
        """Bind a link and decode the messages of `union` from it."""
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._address(link))
        self._poller.register(socket, zmq.POLLIN)
        receiver: Receiver[M] = Receiver(socket, link, self._instance_id, union)
        self._receivers.append(receiver)
        return receiver

    def wait(self, timeout_ms: int | None = None) -> None:
        """Flush what waits to be sent, then block until a message arrives, a full link takes more, or the timeout."""
        blocked = [sender for sender in self._senders if not sender.flush()]
        for sender in blocked:
            self._poller.register(sender._socket, zmq.POLLOUT)
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_fd is not None and self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        for sender in blocked:
            self._poller.unregister(sender._socket)
            sender.flush()

    def open_waker(self) -> Callable[[], None]:
        """What another thread calls to end a `wait`, this one or the next. There is one for each hub."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        return self._wake

    def _wake(self) -> None:
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    def watch(self, add_reader: Callable[[int, Callable[[], None]], None], callback: Callable[[], None]) -> None:
        """For an event loop: call `callback` when a message may have arrived.

        The descriptors are edge-triggered: the callback must `drain` every receiver until it is empty.
        """
        for file_descriptor in self.file_descriptors:
            add_reader(file_descriptor, callback)

    @property
    def file_descriptors(self) -> list[int]:
        """What an event loop watches: one descriptor for each receiver."""
        return [int(receiver._socket.getsockopt(zmq.FD)) for receiver in self._receivers]

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
        """Close all sockets; frames already handed over get half a second to leave."""
        self._context.destroy()
        if self._wake_fd is not None:
            os.close(self._wake_fd)
            self._wake_fd = None

    def _address(self, link: Link) -> str:
        return f"ipc://{self._run_dir / link.name}"
