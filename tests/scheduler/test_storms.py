"""The checks of a storm go red: a storm that went well is falsified by hand, one thing at a time."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from millstream.common.finish_reason import FINISH_LENGTH
from tests.scheduler.simulate_seed import failure_of, play, storm_of
from tests.scheduler.storm import Storm
from tests.scheduler.storm_end import check_end, finish
from tests.scheduler.storm_set_up import EOS, Ask, draw_set_up

PLAIN = {
    **draw_set_up(Random(0)),
    "page_size": 4,
    "num_pages": 32,
    "max_running_requests": 4,
    "context_len": 1000,
    "chunked_prefill_size": 16,
    "max_prefill_tokens": 16384,
    "schedule_policy": "fcfs",
    "enable_priority_scheduling": False,
    "max_queued_requests": 4,
    "max_queued_tokens": None,
    "request_waiting_timeout": 0.0,
    "request_timeout": 0.0,
    "disable_radix_cache": False,
    "disable_overlap_schedule": False,
    "decode_width": 1,
    "failing_token_id": None,
}


def over() -> Storm:
    """r0 and r1 ended by length, r2 was aborted, r3 refused, the text of r4 ended, r5 waited too long."""
    storm = Storm(PLAIN, (3,))
    storm.ask(Ask(0, 12, (5,), 12))
    storm.ask(Ask(0, 12, (6,), 6))
    storm.ask(Ask(1, 12, (), 30))
    storm.ask(Ask(1, 200, (), 6))
    storm.steps(4)
    storm.abort(["r2"])
    storm.ask(Ask(2, 3, (), 40, eos=EOS))
    storm.steps(5)
    storm.end_text("r4", 1)
    storm.pause("retract")
    storm.ask(Ask(2, 3, (), 40, waiting_timeout=1.0))
    storm.advance(9.0)
    finish(storm)
    return storm


def change_stats(storm: Storm, rid: str, **stats: int) -> None:
    ends = storm.harness.clients[rid].ends
    ends[0] = msgspec.structs.replace(ends[0], stats=msgspec.structs.replace(ends[0].stats, **stats))


def forget_abort(storm: Storm) -> None:
    storm.aborted.clear()


FAULTS: dict[str, Callable[[Storm], object]] = {
    "a request has no end": lambda storm: storm.harness.clients["r0"].ends.clear(),
    "a request ended twice": lambda storm: storm.harness.clients["r0"].ends.extend(storm.harness.clients["r0"].ends),
    "a request never started": lambda storm: storm.harness.clients["r0"].starts.clear(),
    "a token is lost": lambda storm: storm.harness.clients["r0"].output_ids.pop(0),
    "a token is another one": lambda storm: storm.harness.clients["r1"].output_ids.reverse(),
    "the last token is missing": lambda storm: storm.harness.clients["r0"].output_ids.pop(),
    "an aborted request got a foreign token": lambda storm: storm.harness.clients["r2"].output_ids.append(99),
    "a request ended for a reason that it had not": lambda storm: storm.harness.clients["r5"].ends.extend(
        [msgspec.structs.replace(storm.harness.clients["r5"].ends.pop(), finish_reason=FINISH_LENGTH(0))]
    ),
    "nobody aborted it": forget_abort,
    "nothing called for a refusal": lambda storm: storm.refusals.clear(),
    "hits that nobody cached": lambda storm: change_stats(storm, "r2", cached_tokens=12),
    "a text end came after fewer tokens than it had": lambda storm: storm.text_ends.update(r4=99),
    "its story is lost": lambda storm: storm.state.journal._ended.pop("r1"),
    "its story tells of another text end": lambda storm: setattr(storm.state.journal._ended["r4"], "text_tokens", 7),
    "a control request is not answered": lambda storm: storm.harness.replies.pop(),
    "a control request is answered twice": lambda storm: storm.harness.replies.append(storm.harness.replies[0]),
    "a page is lost": lambda storm: storm.state.pool.allocator._free_page_ids.pop(),
    "a row is lost": lambda storm: storm.state.free_rows.pop(),
    "the workers keep a row": lambda storm: storm.harness.worker.rows.popitem(),
}


def test_a_plain_storm_is_right() -> None:
    storm = over()
    assert storm.seen["status 499"] == storm.seen["status 400"] == storm.seen["status 503"] == 1
    check_end(storm)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_falsified_end_goes_red(fault: str) -> None:
    storm = over()
    FAULTS[fault](storm)
    with pytest.raises((AssertionError, ValueError)):
        check_end(storm)


def test_a_seed_gives_the_same_storm_each_time() -> None:
    logs = []
    for _ in range(2):
        storm, rng = storm_of(17)
        play(storm, rng)
        logs.append([*storm.log, *(str(client.output_ids) for client in storm.harness.clients.values())])
    assert logs[0] == logs[1]


def test_a_failure_names_its_seed_its_set_up_and_the_command_that_plays_it_again() -> None:
    text = str(failure_of(17, storm_of(17)[0], KeyError("r1")))
    assert text.startswith("seed 17: KeyError: 'r1'\n")
    assert "page_size=" in text
    assert text.endswith("python -m tests.scheduler.simulate_seed 17")
