"""Explanations through the whole scheduler: what a person reads of a request is what happened to it."""

from typing import Any

import pytest

from millstream.common.messages import ExplainedEvent, ExplainReqInput, ExplainReqOutput
from tests.scheduler.harness import Harness


def explain(harness: Harness, rid: str) -> ExplainReqOutput:
    harness.scheduler.handle(ExplainReqInput("question", "http", rid), harness.now)
    (reply,) = harness.scheduler.take_replies()
    assert isinstance(reply, ExplainReqOutput)
    assert (reply.request_id, reply.rid) == ("question", rid)
    seconds = [event.seconds for event in reply.events]
    assert seconds == sorted(seconds)
    return reply


def of_kind(reply: ExplainReqOutput, what: str) -> list[ExplainedEvent]:
    return [event for event in reply.events if event.what == what]


def numbers(reply: ExplainReqOutput, what: str) -> dict[str, Any]:
    (event,) = of_kind(reply, what)
    return event.numbers


def test_a_prompt_in_chunks_is_told_from_the_queue_to_its_end() -> None:
    harness = Harness(chunked_prefill_size=16)
    harness.ask("a", list(range(40)), 5, ignore_eos=True)
    harness.run()
    reply = explain(harness, "a")
    assert reply.status == "ended"
    assert [event.what for event in reply.events] == [
        "queued",
        "admitted",
        "chunk",
        "chunk",
        "chunk",
        "first_token",
        "ended",
    ]
    assert numbers(reply, "queued") == {"position": 0, "queue_tokens": 0, "policy": "fcfs"}
    assert numbers(reply, "admitted") == {"row": 0, "cached_tokens": 0, "new_tokens": 40, "waited_seconds": 0.0}
    assert [event.numbers for event in of_kind(reply, "chunk")] == [
        {"start": 0, "end": 16},
        {"start": 16, "end": 32},
        {"start": 32, "end": 40},
    ]
    assert [event.step for event in of_kind(reply, "chunk")] == [0, 1, 2]
    ended = numbers(reply, "ended")
    assert (ended["reason"], ended["tokens"], ended["retractions"]) == ("length", 5, 0)


def test_a_second_turn_tells_what_was_cached() -> None:
    harness = Harness()
    harness.ask("first", list(range(20)), 4, ignore_eos=True)
    harness.run()
    harness.ask("second", list(range(20)), 4, ignore_eos=True)
    harness.run()
    admitted = numbers(explain(harness, "second"), "admitted")
    assert (admitted["cached_tokens"], admitted["new_tokens"]) == (16, 4)


def test_a_live_request_tells_where_it_is() -> None:
    harness = Harness(max_running_requests=1)
    harness.ask("a", [1, 2, 3], 20, ignore_eos=True)
    harness.ask("b", [4, 5, 6], 20)
    harness.step()
    assert explain(harness, "a").status == "running"
    assert explain(harness, "b").status == "waiting"
    assert explain(harness, "c").status is None


def test_a_retraction_is_told_and_counted() -> None:
    harness = Harness(num_pages=24, schedule_conservativeness=0.0)
    rids = [f"r{index}" for index in range(6)]
    for index, rid in enumerate(rids):
        harness.ask(rid, [index] * (4 + index), 30)
    harness.run()
    replies = [explain(harness, rid) for rid in rids]
    assert sum(len(of_kind(reply, "retracted")) for reply in replies) == harness.state.stats.num_retractions > 0
    for reply in replies:
        num_retractions = len(of_kind(reply, "retracted"))
        assert numbers(reply, "ended")["retractions"] == num_retractions
        assert len(of_kind(reply, "admitted")) == 1 + num_retractions
        assert len(of_kind(reply, "first_token")) == 1


@pytest.mark.parametrize("ends_before", [True, False])
def test_a_text_end_has_its_own_number_of_tokens_also_after_the_end_by_token(*, ends_before: bool) -> None:
    harness = Harness()
    harness.ask("a", [1, 2, 3], 6, ignore_eos=True)
    if ends_before:
        while len(harness.clients["a"].output_ids) < 4:
            harness.step()
    else:
        harness.run()
    harness.clients["a"].ends.clear()
    harness.end_text("a", 3)
    harness.run()
    reply = explain(harness, "a")
    ended = numbers(reply, "ended")
    assert (ended["reason"], ended["tokens"]) == ("text", 3)
    assert numbers(reply, "text_ended") == {"tokens": 3}


def test_an_abort_and_a_refusal_say_why() -> None:
    harness = Harness(context_len=50)
    harness.ask("a", [1, 2, 3], 40, ignore_eos=True)
    for _ in range(5):
        harness.step()
    harness.abort("a")
    harness.ask("long", [1] * 60)
    assert numbers(explain(harness, "a"), "ended")["reason"] == "abort"
    refused = numbers(explain(harness, "long"), "refused")
    assert refused["status_code"] == 400
    assert "60 tokens" in refused["reason"]


def test_a_request_that_waits_tells_what_kept_it_from_starting_and_for_how_long() -> None:
    harness = Harness(num_pages=10, max_running_requests=2)
    harness.ask("a", [1, 2, 3], 20, ignore_eos=True)
    harness.step()
    harness.ask("large", [5] * 20, 12, ignore_eos=True)
    for _ in range(10):
        harness.now += 1
        harness.step()
    (event,) = of_kind(explain(harness, "large"), "blocked")
    assert event.numbers["reason"] != "rows"
    assert int(event.numbers["steps"]) >= 10
    assert float(event.numbers["for_seconds"]) >= 9
    assert len(event.numbers) > 4, "and the budgets in numbers"
    harness.run()
    events = [each.what for each in explain(harness, "large").events]
    assert events == ["queued", "blocked", "admitted", "chunk", "first_token", "ended"]


def test_a_request_that_waits_for_a_row_tells_so() -> None:
    harness = Harness(max_running_requests=1)
    harness.ask("a", [1, 2, 3], 20, ignore_eos=True)
    harness.ask("b", [4, 5, 6], 20)
    harness.run()
    assert numbers(explain(harness, "b"), "blocked")["reason"] == "rows"
