"""Who ends when: tokens, length, aborts in every state, text ends, failed rows."""

from collections.abc import Callable

import pytest

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN
from millstream.common.messages import FlushCacheReqInput, unpack_int32
from millstream.scheduler.req import ReqStatus
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

PROMPT = [7, 8, 9]
ALONE = reference_outputs(PROMPT, VOCAB_SIZE, 30)


def test_length_ends_a_request_and_no_row_is_planned_past_it() -> None:
    harness = Harness()
    client = harness.ask("r", PROMPT, 5)
    harness.run()
    assert client.output_ids == ALONE[:5]
    assert client.ends[0].finish_reason == FINISH_LENGTH(5)
    assert len(harness.batches) == 5


def test_eos_ends_a_request_is_among_its_outputs_and_is_learnt_one_row_late() -> None:
    harness = Harness()
    client = harness.ask("r", PROMPT, 30, eos=(ALONE[3],))
    harness.run()
    assert client.output_ids == ALONE[: ALONE.index(ALONE[3]) + 1]
    assert client.ends[0].finish_reason == FINISH_MATCHED_TOKEN(ALONE[3])
    assert client.ends[0].num_tokens == len(client.output_ids)
    assert len(harness.batches) == len(client.output_ids) + 1


def test_without_overlap_no_row_is_computed_in_vain() -> None:
    harness = Harness(disable_overlap_schedule=True)
    client = harness.ask("r", PROMPT, 30, stop_token_ids=(ALONE[3],))
    harness.run()
    assert len(harness.batches) == len(client.output_ids)


def test_ignore_eos_switches_every_stop_id_off() -> None:
    harness = Harness()
    client = harness.ask("r", PROMPT, 9, eos=(ALONE[1],), stop_token_ids=(ALONE[2],), ignore_eos=True)
    harness.run()
    assert client.output_ids == ALONE[:9]
    assert harness.batches[0].new_reqs[0].end_token_ids == ()


def test_stop_ids_are_told_to_the_workers_which_mask_them_until_min_new_tokens() -> None:
    harness = Harness()
    client = harness.ask("r", PROMPT, 9, eos=(ALONE[0],), min_new_tokens=2)
    harness.run()
    assert harness.batches[0].new_reqs[0].end_token_ids == (ALONE[0],)
    assert client.output_ids == reference_outputs(PROMPT, VOCAB_SIZE, 9, (ALONE[0],), 2)
    assert len(client.output_ids) >= 2


def test_a_stop_id_at_the_last_token_wins_over_length() -> None:
    harness = Harness()
    first = ALONE.index(ALONE[4]) + 1
    client = harness.ask("r", PROMPT, first, eos=(ALONE[4],))
    harness.run()
    assert client.ends[0].finish_reason == FINISH_MATCHED_TOKEN(ALONE[4])


def waiting(harness: Harness) -> None:
    """Asked, and not planned."""


def chunked(harness: Harness) -> None:
    harness.plan()
    harness.answer()


def chunk_in_flight(harness: Harness) -> None:
    harness.plan()


def running(harness: Harness) -> None:
    for _ in range(4):
        harness.plan()
        harness.answer()


def in_flight(harness: Harness) -> None:
    running(harness)
    assert harness.plan()
    assert harness.plan()


def retracted(harness: Harness) -> None:
    running(harness)
    harness.state.retract(harness.req("r"), "retracted")


STATES = {
    waiting: ReqStatus.WAITING,
    chunked: ReqStatus.PREFILLING,
    chunk_in_flight: ReqStatus.PREFILLING,
    running: ReqStatus.RUNNING,
    in_flight: ReqStatus.RUNNING,
    retracted: ReqStatus.RETRACTED,
}
in_every_state = pytest.mark.parametrize(("reach", "status"), STATES.items(), ids=[each.__name__ for each in STATES])


@in_every_state
def test_an_abort_ends_a_request_at_once_and_exactly_once(reach: Callable[[Harness], None], status: ReqStatus) -> None:
    harness = Harness(chunked_prefill_size=8)
    client = harness.ask("r", list(range(20)), 30)
    reach(harness)
    assert harness.req("r").status is status
    harness.abort("r")
    assert isinstance(client.ends[0].finish_reason, FINISH_ABORT)
    assert client.ends[0].num_tokens == len(client.output_ids)
    harness.abort("r")
    harness.end_text("r", 0)
    harness.run()
    assert len(client.ends) == 1
    assert harness.scheduler.state.pool.num_available_pages == 64


@in_every_state
def test_a_text_end_is_taken_in_every_state_and_nothing_more_is_sent(
    reach: Callable[[Harness], None], status: ReqStatus
) -> None:
    harness = Harness(chunked_prefill_size=8)
    client = harness.ask("r", list(range(20)), 30)
    reach(harness)
    assert harness.req("r").status is status
    num_outputs = len(client.output_ids)
    harness.end_text("r", max(0, num_outputs - 1))
    harness.end_text("r", max(0, num_outputs - 1))
    harness.abort("r")
    harness.run()
    assert client.ends == []
    assert len(client.output_ids) == num_outputs


def test_an_abort_of_no_ids_and_of_unknown_ids_ends_nobody() -> None:
    harness = Harness()
    client = harness.ask("r", PROMPT, 5)
    harness.abort()
    harness.abort("r1", "", "R")
    harness.run()
    assert client.ends[0].finish_reason == FINISH_LENGTH(5)


def test_pages_of_an_aborted_request_come_back_only_with_the_steps_in_flight() -> None:
    harness = Harness(disable_radix_cache=True)
    harness.ask("r", PROMPT, 30)
    in_flight(harness)
    harness.abort("r")
    assert harness.req("r").status is ReqStatus.ENDING
    assert harness.scheduler.state.pool.allocator.num_free_pages < 64
    harness.answer()
    assert harness.scheduler.state.pool.allocator.num_free_pages < 64
    harness.answer()
    assert harness.scheduler.state.pool.allocator.num_free_pages == 64


def test_the_tokens_that_a_text_end_keeps_serve_the_next_turn() -> None:
    harness = Harness(page_size=1)
    client = harness.ask("r", PROMPT, 30)
    while len(client.output_ids) < 6:
        harness.step()
    harness.end_text("r", 3)
    next_turn = harness.ask("next", [*PROMPT, *ALONE[:3], (ALONE[3] + 1) % VOCAB_SIZE, 1], 2)
    harness.run()
    assert next_turn.cached_tokens == len(PROMPT) + 3


def test_a_row_that_failed_ends_with_the_workers_message_and_caches_nothing_of_that_step() -> None:
    harness = Harness(page_size=1, failing_token_id=ALONE[4])
    client, other = harness.ask("r", PROMPT, 30), harness.ask("other", [1, 2], 5)
    harness.run()
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert (reason.status_code, reason.message) == (500, "not a number")
    first = ALONE.index(ALONE[4]) + 1
    assert client.output_ids == ALONE[:first]
    assert other.ends[0].finish_reason == FINISH_LENGTH(5)
    followed = harness.ask("again", [*PROMPT, *ALONE[:first], 1], 1)
    harness.run()
    assert followed.cached_tokens == len(PROMPT) + first - 1


def test_the_end_carries_what_usage_needs() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", list(range(13)), 2)
    harness.run()
    client = harness.ask("r", list(range(13)), 2)
    harness.now += 2.5
    harness.run()
    stats = client.ends[0].stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.num_retractions) == (13, 12, 0)
    start = client.starts[0]
    assert unpack_int32(start.context_ids) == list(range(5, 13))
    assert start.prompt_len == 13


def test_the_cache_is_flushed_only_when_nothing_runs_or_waits() -> None:
    harness = Harness()
    harness.ask("r", PROMPT, 3)
    harness.scheduler.handle(FlushCacheReqInput("busy", "http"), harness.now)
    harness.run()
    harness.scheduler.handle(FlushCacheReqInput("idle", "http"), harness.now)
    harness.plan()
    assert [(reply.request_id, reply.success) for reply in harness.replies] == [("busy", False), ("idle", True)]
    assert harness.scheduler.state.pool.allocator.num_free_pages == 64


def test_a_flush_waits_for_steps_in_flight_of_requests_that_have_ended() -> None:
    harness = Harness()
    harness.ask("r", PROMPT, 30)
    harness.plan()
    harness.abort("r")
    harness.scheduler.handle(FlushCacheReqInput("flush", "http"), harness.now)
    harness.plan()
    assert harness.replies == []
    harness.answer()
    harness.plan()
    assert harness.replies[0].success
