"""The detokenizer as a process: tokens in through one link, text and text ends out through two."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from millstream.common.channel import Hub, Receiver
from millstream.common.config import ChildConfig, ServerArgs
from millstream.common.finish_reason import FINISH_LENGTH, FINISH_MATCHED_STR
from millstream.common.links import (
    FromDetokenizer,
    detokenizer_to_manager,
    detokenizer_to_scheduler,
    scheduler_to_detokenizer,
)
from millstream.common.messages import DetokenizerHeartbeat, DetokenizerReady, pack_int32
from millstream.common.process import read_cause, start_child
from millstream.common.run_dir import create_run_dir, leave_run_dir
from millstream.common.text_messages import BatchStrOutput, BatchTokenIDOutput, RequestEnd, RequestStats, TextEnded
from tests.detokenizer.reference_text import start_of
from tests.text.sample_tokenizers import smollm2

M = TypeVar("M")
DEADLINE = 20.0
ENTRY = "millstream.detokenizer.process:run"


@pytest.fixture
def run_dir() -> Iterator[Path]:
    run_dir, lock = create_run_dir()
    yield run_dir
    leave_run_dir(run_dir, lock)
    assert not run_dir.exists()


@pytest.fixture
def hub(run_dir: Path) -> Iterator[Hub]:
    hub = Hub(run_dir, 9)
    yield hub
    hub.close()


def config(run_dir: Path, model: str) -> ChildConfig:
    args = ServerArgs(model_path=model)
    return ChildConfig(name="detokenizer", rank=0, run_dir=str(run_dir), instance_id=9, args=args)


def receive(hub: Hub, receiver: Receiver[M], count: int) -> list[M]:
    found: list[M] = []
    deadline = time.monotonic() + DEADLINE
    while len(found) < count:
        hub.wait(100)
        found += [message for message in receiver.drain() if not isinstance(message, DetokenizerHeartbeat)]
        assert time.monotonic() < deadline
    return found


def test_tokens_become_text_and_a_stop_string_is_told_to_the_scheduler(run_dir: Path, hub: Hub) -> None:
    from_detokenizer: Receiver[FromDetokenizer] = hub.open_receiver(detokenizer_to_manager(), FromDetokenizer)
    to_scheduler: Receiver[TextEnded] = hub.open_receiver(detokenizer_to_scheduler(), TextEnded)
    with start_child(ENTRY, config(run_dir, "smollm2")) as child:
        tokens = hub.open_sender(scheduler_to_detokenizer())
        assert receive(hub, from_detokenizer, 1)[:1] == [DetokenizerReady()]
        ids = [smollm2().encode(text) for text in ("one two", "Hello")]
        tokens.send(
            BatchTokenIDOutput(
                starts=[start_of("a", stop=("two",)), start_of("b")],
                rids=["a", "b"],
                generations=pack_int32([0, 0]),
                cached_tokens=pack_int32([0, 0]),
                num_tokens=pack_int32([2, 1]),
                token_ids=pack_int32([*ids[0], *ids[1]]),
                ends=[RequestEnd("b", FINISH_LENGTH(1), 1, RequestStats(7, 0, 0))],
            )
        )
        (message,) = receive(hub, from_detokenizer, 1)
        assert isinstance(message, BatchStrOutput)
        assert [(out.rid, out.text, out.end and out.end.finish_reason) for out in message.outputs] == [
            ("a", "one ", FINISH_MATCHED_STR("two")),
            ("b", "Hello", FINISH_LENGTH(1)),
        ]
        assert receive(hub, to_scheduler, 1) == [TextEnded("a", 0, 2)]
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE) == 0


def test_what_one_request_brings_does_not_end_the_process(run_dir: Path, hub: Hub) -> None:
    from_detokenizer: Receiver[FromDetokenizer] = hub.open_receiver(detokenizer_to_manager(), FromDetokenizer)
    to_scheduler: Receiver[TextEnded] = hub.open_receiver(detokenizer_to_scheduler(), TextEnded)
    with start_child(ENTRY, config(run_dir, "smollm2")) as child:
        tokens = hub.open_sender(scheduler_to_detokenizer())
        receive(hub, from_detokenizer, 1)
        half_an_id = msgspec.structs.replace(start_of("half an id"), context_ids=b"\0\0")
        starts = [start_of("regex", stop_regex=("x{99999999999}",)), half_an_id, start_of("good")]
        no_tokens = pack_int32([])
        end = RequestEnd("good", FINISH_LENGTH(0), 0, RequestStats(7, 0, 0))
        tokens.send(BatchTokenIDOutput(starts, [], no_tokens, no_tokens, no_tokens, no_tokens, [end]))
        (message,) = receive(hub, from_detokenizer, 1)
        assert isinstance(message, BatchStrOutput)
        reasons = {out.rid: out.end and out.end.finish_reason for out in message.outputs}
        assert [getattr(reasons[rid], "status_code", None) for rid in ("regex", "half an id")] == [500, 500]
        assert reasons["good"] == FINISH_LENGTH(0)
        assert receive(hub, to_scheduler, 2) == [TextEnded("regex", 0, 0), TextEnded("half an id", 0, 0)]
        assert child.poll() is None


def test_a_model_without_a_tokenizer_ends_the_process_with_its_cause(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with start_child(ENTRY, config(run_dir, str(tmp_path / "model"))) as child:
        assert child.wait(DEADLINE) == 1
    assert "has no tokenizer.json" in (read_cause(run_dir, "detokenizer") or "")


def test_an_idle_detokenizer_uses_no_time(run_dir: Path, hub: Hub) -> None:
    from_detokenizer: Receiver[FromDetokenizer] = hub.open_receiver(detokenizer_to_manager(), FromDetokenizer)
    hub.open_receiver(detokenizer_to_scheduler(), TextEnded)
    with start_child(ENTRY, config(run_dir, "smollm2")) as child:
        receive(hub, from_detokenizer, 1)
        before = cpu_seconds(child.pid)
        time.sleep(1.0)
        assert cpu_seconds(child.pid) - before < 0.06


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
