"""Channels: order, loss, foreign frames, pieces of frames, back-pressure."""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.common.channel import HEADER, MAX_PENDING, READ_BYTES, Hub, LostMessage, Receiver
from millstream.common.links import ToScheduler, manager_to_scheduler, scheduler_to_detokenizer
from millstream.common.messages import (
    AbortReq,
    BatchTokenIDOutput,
    LoadProgress,
    pack_int32,
    unpack_int32,
)

INSTANCE = 77


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path, INSTANCE)
    yield hub
    hub.close()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[], socket.socket]]:
    """Connections to the link from the manager, that are no Sender's."""
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        opened[-1].connect(str(tmp_path / manager_to_scheduler().name))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def receive(hub: Hub, receiver: Receiver[ToScheduler], count: int) -> list[ToScheduler]:
    found: list[ToScheduler] = []
    for _ in range(100):
        hub.wait(50)
        found += receiver.drain()
        if len(found) >= count:
            break
    return found


def frame(sequence: int, body: bytes, instance: int = INSTANCE) -> bytes:
    return HEADER.pack(len(body), instance, sequence) + body


ABORT = msgspec.msgpack.encode(AbortReq(["a"]))


def test_messages_arrive_in_order_even_when_the_receiver_binds_later(hub: Hub) -> None:
    sender = hub.open_sender(manager_to_scheduler())
    sent = [AbortReq([str(number)]) for number in range(20)]
    for message in sent[:10]:
        sender.send(message)
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    for message in sent[10:]:
        sender.send(message)
    assert receive(hub, receiver, 20) == sent


def test_a_loop_that_waits_reaches_a_receiver_that_binds_meanwhile(tmp_path: Path, hub: Hub) -> None:
    sender = hub.open_sender(manager_to_scheduler())
    sender.send(AbortReq(["a"]))
    other = Hub(tmp_path, INSTANCE)
    receivers: list[Receiver[ToScheduler]] = []
    bind = threading.Timer(0.1, lambda: receivers.append(other.open_receiver(manager_to_scheduler(), ToScheduler)))
    bind.start()
    begin = time.monotonic()
    while sender.num_pending:
        hub.wait(10_000)
    assert time.monotonic() - begin < 5
    bind.join()
    assert receive(other, receivers[0], 1) == [AbortReq(["a"])]
    other.close()


def test_a_frame_of_another_boot_is_dropped_and_counted(hub: Hub, connect: Callable[[], socket.socket]) -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    foreign = connect()
    foreign.sendall(frame(0, ABORT, instance=INSTANCE + 1))
    while not receiver.num_dropped:
        hub.wait(1000)
        assert receiver.drain() == []
    assert receiver.num_dropped == hub.num_dropped == 1
    with pytest.raises(BrokenPipeError):  # whatever else it says
        foreign.sendall(frame(0, ABORT))
    sender = hub.open_sender(manager_to_scheduler())
    sender.send(AbortReq(["b"]))
    assert receive(hub, receiver, 1) == [AbortReq(["b"])]
    assert receiver.num_dropped == 1


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", ABORT[:-1], ABORT + b"\x00", msgspec.msgpack.encode(LoadProgress(0, 1, 2))]
)
def test_a_frame_that_is_not_of_the_link_is_dropped_and_the_next_one_counts(
    hub: Hub, connect: Callable[[], socket.socket], body: bytes
) -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    connect().sendall(frame(0, body) + frame(1, ABORT))
    assert receive(hub, receiver, 1) == [AbortReq(["a"])]
    assert receiver.num_dropped == 1


@given(st.lists(st.binary(max_size=64), max_size=4), st.lists(st.integers(1, 20), min_size=1), st.binary(max_size=64))
def test_frames_are_the_same_however_they_are_cut_and_random_bytes_never_raise(
    bodies: list[bytes], cuts: list[int], garbage: bytes
) -> None:
    receiver: Receiver[ToScheduler] = Receiver(manager_to_scheduler(), INSTANCE, ToScheduler)
    stream = b"".join(frame(number, body) for number, body in enumerate([*bodies, ABORT])) + garbage
    unread, messages = bytearray(), list[ToScheduler]()
    while stream:
        for cut in cuts:
            unread += stream[:cut]
            stream = stream[cut:]
            if not receiver._cut(unread, messages):
                assert receiver.num_dropped == len(bodies) + 1
                unread.clear()
                stream = b""
    assert messages == [AbortReq(["a"])]
    assert receiver.num_dropped >= len(bodies)


@pytest.mark.parametrize("sequence", [1, 5, 2**64 - 1])
def test_a_gap_in_the_sequence_raises(hub: Hub, connect: Callable[[], socket.socket], sequence: int) -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    connect().sendall(frame(sequence, ABORT))
    with pytest.raises(LostMessage, match=r"tokenizer_manager-scheduler: expected message 0"):
        receive(hub, receiver, 1)


def test_messages_larger_than_any_buffer_arrive_whole_between_small_ones(hub: Hub) -> None:
    sender, receiver = hub.open_sender(manager_to_scheduler()), hub.open_receiver(manager_to_scheduler(), ToScheduler)
    sent = [AbortReq(["x" * size]) for size in (1, 40 * READ_BYTES, 2, READ_BYTES, 3)]
    for message in sent:
        sender.send(message)
    assert sender.num_pending > 0
    assert receive(hub, receiver, len(sent)) == sent
    assert sender.num_pending == 0


def test_a_sender_without_a_reader_keeps_everything_and_says_when_it_is_full(hub: Hub) -> None:
    sender = hub.open_sender(manager_to_scheduler())
    number = 0
    while not sender.is_full:
        sender.send(AbortReq([str(number)]))
        number += 1
        assert number < 10 * MAX_PENDING
    assert hub.is_full
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    assert receive(hub, receiver, number) == [AbortReq([str(index)]) for index in range(number)]
    assert not hub.is_full


def test_a_reader_that_stops_reading_fills_the_link_and_gets_everything_once_it_goes_on(
    tmp_path: Path, hub: Hub
) -> None:
    other = Hub(tmp_path, INSTANCE)
    receiver: Receiver[ToScheduler] = other.open_receiver(manager_to_scheduler(), ToScheduler)
    sender = hub.open_sender(manager_to_scheduler())
    number = 0
    while not sender.is_full:
        sender.send(AbortReq([str(number)]))
        number += 1
    found: list[ToScheduler] = []
    while len(found) < number:
        other.wait(0)
        found += receiver.drain()
        hub.wait(0)
    assert found == [AbortReq([str(index)]) for index in range(number)]
    other.close()


def test_where_the_reader_has_gone_frames_stay_and_waiting_blocks(tmp_path: Path, hub: Hub) -> None:
    other = Hub(tmp_path, INSTANCE)
    receiver: Receiver[ToScheduler] = other.open_receiver(manager_to_scheduler(), ToScheduler)
    sender = hub.open_sender(manager_to_scheduler())
    sender.send(AbortReq(["a"]))
    assert receive(other, receiver, 1) == [AbortReq(["a"])]
    other.close()
    for _ in range(5):
        sender.send(AbortReq(["b"]))
    assert sender.num_pending == 5
    begin, used = time.monotonic(), time.process_time()
    hub.wait(300)
    assert time.monotonic() - begin > 0.25
    assert time.process_time() - used < 0.1


def test_a_link_that_is_not_drained_does_not_lose_its_turn(hub: Hub) -> None:
    """A loop may leave a link alone for a while, as the detokenizer does when its reader is behind."""
    sender, receiver = hub.open_sender(manager_to_scheduler()), hub.open_receiver(manager_to_scheduler(), ToScheduler)
    sender.send(AbortReq(["a"]))
    for _ in range(5):
        hub.wait(10)
    assert receiver.drain() == [AbortReq(["a"])]
    assert receiver.drain() == []


def test_links_do_not_mix(hub: Hub) -> None:
    one = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    other = hub.open_receiver(scheduler_to_detokenizer(), BatchTokenIDOutput)
    hub.open_sender(manager_to_scheduler()).send(AbortReq(["a"]))
    assert receive(hub, one, 1) == [AbortReq(["a"])]
    assert other.drain() == []


def test_what_an_event_loop_watches_is_readable_while_something_waits(hub: Hub) -> None:
    receiver = hub.open_receiver(scheduler_to_detokenizer(), BatchTokenIDOutput)
    sender = hub.open_sender(scheduler_to_detokenizer())
    assert not is_readable(hub.file_descriptor)
    message = BatchTokenIDOutput([], [], b"", b"", b"", b"", [])
    sender.send(message)
    found: list[BatchTokenIDOutput] = []
    while is_readable(hub.file_descriptor):
        hub.wait(0)
        found += receiver.drain()
    assert found == [message]


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_integer_columns_round_trip_and_refuse_what_does_not_fit() -> None:
    assert unpack_int32(pack_int32([0, -1, 2**31 - 1, -(2**31)])) == [0, -1, 2**31 - 1, -(2**31)]
    with pytest.raises(OverflowError):
        pack_int32([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_int32(b"\x00\x00\x00")
    assert pack_int32([1]) == struct.pack("=i", 1)
