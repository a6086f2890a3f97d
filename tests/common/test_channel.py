"""Channels: order, loss, foreign frames, back-pressure."""

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from millstream.common.channel import HEADER, MAX_PENDING, Hub, LostMessage, Receiver
from millstream.common.links import FromScheduler, ToScheduler, manager_to_scheduler, scheduler_to_manager
from millstream.common.messages import AbortReq, LoadProgress, pack_int32, unpack_int32

INSTANCE = 77


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path, INSTANCE)
    yield hub
    hub.close()


@pytest.fixture
def raw_sender(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path / manager_to_scheduler().name}")
    yield socket
    context.destroy(linger=0)


def receive(hub: Hub, receiver: Receiver[ToScheduler], count: int) -> list[ToScheduler]:
    found: list[ToScheduler] = []
    for _ in range(100):
        hub.wait(50)
        found += receiver.drain()
        if len(found) >= count:
            break
    return found


def frame(sequence: int, body: bytes, instance: int = INSTANCE) -> bytes:
    return HEADER.pack(instance, sequence) + body


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


def test_messages_that_are_sent_together_arrive_in_order_as_messages_of_their_own(hub: Hub) -> None:
    sender = hub.open_sender(manager_to_scheduler())
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    sent = [AbortReq([str(number)]) for number in range(7)]
    sender.send(*sent[:3])
    sender.send(sent[3])
    sender.send(*sent[4:])
    assert receive(hub, receiver, 7) == sent


def test_a_frame_of_another_boot_is_dropped_and_counted(hub: Hub, raw_sender: "zmq.Socket[bytes]") -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    raw_sender.send(frame(0, ABORT, instance=INSTANCE + 1))
    raw_sender.send(frame(0, ABORT))
    assert receive(hub, receiver, 1) == [AbortReq(["a"])]
    assert receiver.num_dropped == hub.num_dropped == 1


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", ABORT[:-1], ABORT + b"\x00", msgspec.msgpack.encode(LoadProgress(0, 1, 2))]
)
def test_a_frame_that_is_not_of_the_link_is_dropped_and_the_next_one_counts(
    hub: Hub, raw_sender: "zmq.Socket[bytes]", body: bytes
) -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    raw_sender.send(frame(0, body))
    raw_sender.send(frame(1, ABORT))
    assert receive(hub, receiver, 1) == [AbortReq(["a"])]
    assert receiver.num_dropped == 1


@given(st.binary(max_size=64))
def test_random_bodies_never_raise(body: bytes) -> None:
    receiver: Receiver[FromScheduler] = Receiver(None, scheduler_to_manager(), INSTANCE, FromScheduler)  # type: ignore[arg-type]
    receiver._decode(frame(0, body))
    receiver._decode(body)
    assert receiver.num_dropped >= 1  # a body is no frame of its own


@pytest.mark.parametrize("sequence", [1, 5, 2**64 - 1])
def test_a_gap_in_the_sequence_raises(hub: Hub, raw_sender: "zmq.Socket[bytes]", sequence: int) -> None:
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    raw_sender.send(frame(sequence, ABORT))
    with pytest.raises(LostMessage, match=r"tokenizer_manager-scheduler: expected message 0"):
        receive(hub, receiver, 1)


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


def test_of_a_full_link_nothing_is_lost_or_doubled_when_several_messages_are_sent_at_once(hub: Hub) -> None:
    sender = hub.open_sender(manager_to_scheduler())
    number = 0
    while not sender.is_full:
        sender.send(*[AbortReq([str(number + index)]) for index in range(3)])
        number += 3
    receiver = hub.open_receiver(manager_to_scheduler(), ToScheduler)
    assert receive(hub, receiver, number) == [AbortReq([str(index)]) for index in range(number)]


def test_integer_columns_round_trip_and_refuse_what_does_not_fit() -> None:
    assert unpack_int32(pack_int32([0, -1, 2**31 - 1, -(2**31)])) == [0, -1, 2**31 - 1, -(2**31)]
    with pytest.raises(OverflowError):
        pack_int32([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_int32(b"\x00\x00\x00")
    assert pack_int32([1]) == struct.pack("=i", 1)


def test_another_thread_ends_a_wait_and_a_call_ahead_of_it_is_not_lost(hub: Hub) -> None:
    wake = hub.open_waker()
    wake()
    wake()
    start = time.monotonic()
    hub.wait(20_000)
    timer = threading.Timer(0.05, wake)
    timer.start()
    hub.wait(20_000)
    assert 0.04 < time.monotonic() - start < 10
    timer.join()
    start = time.monotonic()
    hub.wait(30)
    assert time.monotonic() - start > 0.02  # what woke it once does not wake it again
    hub.close()
    wake()
