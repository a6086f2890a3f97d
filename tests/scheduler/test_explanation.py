"""The journal: every story in order, repeats collapsed, memory bounded."""

import random
import tracemalloc
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.common.messages import ExplainedEvent, PauseGenerationReqInput, TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.explanation import MAX_EVENTS, Journal
from millstream.scheduler.req import Req, ReqStatus
from tests.scheduler.harness import Harness

ARRIVAL = 100.0


def new_req(rid: str = "a", arrival: float = ARRIVAL) -> Req:
    message = TokenizedGenerateReqInput(rid, "http", arrival, pack_int32([1, 2]), SamplingParams())
    return Req(message, array("i", [1, 2]), 8)


def words(events: list[ExplainedEvent]) -> list[str]:
    return [event.what for event in events]


def test_a_story_is_told_in_order_with_its_numbers_and_seconds_since_arrival() -> None:
    journal, req = Journal(), new_req()
    journal.note(req, ARRIVAL + 0.5, 3, "queued", position=2, policy="fcfs")
    journal.note(req, ARRIVAL + 1.25, 4, "admitted", row=0, cached_tokens=16)
    assert journal.explain("a") == (
        "waiting",
        [
            ExplainedEvent(0.5, 3, "queued", {"position": 2, "policy": "fcfs"}),
            ExplainedEvent(1.25, 4, "admitted", {"row": 0, "cached_tokens": 16}),
        ],
    )


def test_an_unknown_request_has_no_status_and_no_story() -> None:
    assert Journal().explain("nobody") == (None, [])


def test_the_status_is_the_place_of_a_live_request_and_then_ended() -> None:
    journal, req = Journal(), new_req()
    journal.note(req, ARRIVAL, 0, "queued")
    req.move_to(ReqStatus.RUNNING)
    assert journal.explain("a")[0] == "running"
    journal.end(req, ARRIVAL, 1, reason="length")
    assert journal.explain("a")[0] == "ended"


def test_repeats_of_a_reason_are_one_event_with_the_numbers_of_the_last() -> None:
    journal, req = Journal(), new_req()
    for step in range(5, 9):
        journal.blocked(req, ARRIVAL + step, step, "kv_cache", missing_tokens=100 - step)
        journal.blocked(req, ARRIVAL + step, step, "kv_cache", missing_tokens=90 - step)
    (event,) = journal.explain("a")[1]
    numbers = {"reason": "kv_cache", "steps": 4, "last_step": 8, "for_seconds": 3.0, "missing_tokens": 82}
    assert event == ExplainedEvent(5.0, 5, "blocked", numbers)


def test_reasons_that_alternate_are_one_event_each_until_something_else_happens() -> None:
    journal, req = Journal(), new_req()
    for step in range(1000):
        journal.blocked(req, ARRIVAL + step, step, ("rows", "kv_cache")[step % 2])
    journal.note(req, ARRIVAL + 1000, 1000, "admitted")
    journal.blocked(req, ARRIVAL + 1001, 1001, "rows")
    events = journal.explain("a")[1]
    assert [event.numbers.get("reason") for event in events] == ["rows", "kv_cache", None, "rows"]
    assert [event.numbers.get("steps") for event in events] == [500, 500, None, 1]


def test_the_end_counts_outputs_retractions_and_steps() -> None:
    journal, req = Journal(), new_req()
    journal.note(req, ARRIVAL, 7, "admitted")
    journal.note(req, ARRIVAL, 9, "admitted")
    req.token_ids.extend([5, 6, 7])
    req.num_retractions = 2
    journal.end(req, ARRIVAL + 1, 20, reason="length")
    last = journal.explain("a")[1][-1]
    assert last.numbers == {"reason": "length", "tokens": 3, "retractions": 2, "steps": 13}


def test_a_second_end_changes_nothing() -> None:
    journal, req = Journal(), new_req()
    journal.end(req, ARRIVAL, 0, reason="length")
    told = journal.explain("a")
    journal.end(req, ARRIVAL, 1, reason="abort")
    assert journal.explain("a") == told


@pytest.mark.parametrize("is_first", [True, False])
def test_the_text_end_says_how_many_tokens_count_before_or_after_the_end_by_token(*, is_first: bool) -> None:
    journal, req = Journal(), new_req()
    req.token_ids.extend([5, 6, 7])
    journal.note(req, ARRIVAL, 0, "queued")
    if is_first:
        journal.text_ended("a", ARRIVAL, 3, 2)
    journal.end(req, ARRIVAL, 3, reason="length")
    journal.text_ended("a", ARRIVAL, 4, 2)
    events = journal.explain("a")[1]
    assert words(events)[1:] == (["text_ended", "ended"] if is_first else ["ended", "text_ended"])
    ended = next(event for event in events if event.what == "ended")
    assert (ended.numbers["reason"], ended.numbers["tokens"]) == ("text", 2)


def test_a_text_end_of_an_unknown_request_is_ignored() -> None:
    journal = Journal()
    journal.text_ended("nobody", 0.0, 0, 2)
    assert len(journal) == 0


def test_a_refused_request_is_known_with_its_reason() -> None:
    journal = Journal()
    journal.refused("a", 1.0, 3.0, 5, status_code=429, reason="The queue is full.")
    assert journal.explain("a") == (
        "ended",
        [ExplainedEvent(2.0, 5, "refused", {"status_code": 429, "reason": "The queue is full."})],
    )


def test_who_waits_behind_others_learns_what_kept_the_first_of_them_out() -> None:
    harness = Harness(max_running_requests=1)
    for index in range(4):
        harness.ask(f"r{index}", [index, 2, 3], 5, arrival=0.0)
    for second in range(1, 6):
        harness.now = float(second)
        harness.step()
    _, events = harness.state.journal.explain("r3", 5.5, 9)
    assert words(events) == ["queued", "waited"]
    assert list(events[-1].numbers) == ["rows"]
    assert events[-1].numbers["rows"] == pytest.approx(4.5, abs=1.0)
    harness.run()
    _, events = harness.state.journal.explain("r3")
    assert words(events)[0] == "queued"
    assert "waited" in words(events)


def test_who_waits_during_a_pause_is_told_so() -> None:
    harness = Harness()
    harness.scheduler.handle(PauseGenerationReqInput("pause", "http"), 0.0)
    harness.ask("r", [1, 2], 3, arrival=0.0)
    for now in (1.0, 4.0):
        harness.now = now
        harness.plan()
    _, events = harness.state.journal.explain("r", 4.0, 0)
    assert events[-1].numbers == {"paused": 3.0}


def test_refusals_push_no_story_out() -> None:
    journal = Journal(max_requests=10)
    journal.end(new_req("a"), ARRIVAL, 1)
    for index in range(100):
        journal.refused(f"r{index}", ARRIVAL, ARRIVAL, 0, status_code=429, reason="full")
    assert journal.explain("a")[0] == "ended"
    assert len(journal) == 11


def test_the_last_thousand_that_ended_are_kept_and_all_that_live() -> None:
    journal = Journal(max_requests=1000)
    live = [new_req(f"live{index}") for index in range(1200)]
    for req in live:
        journal.note(req, ARRIVAL, 0, "queued")
    for index in range(2500):
        journal.end(new_req(f"r{index}"), ARRIVAL, 1)
    assert len(journal) == 2200
    assert all(journal.explain(req.rid)[0] == "waiting" for req in live)
    assert journal.explain("r1499")[0] is None
    assert all(journal.explain(f"r{index}")[0] == "ended" for index in range(1500, 2500))


def test_memory_is_bounded_however_long_the_stories_are() -> None:
    journal = Journal(max_requests=100)
    tracemalloc.start()
    for index in range(300):
        req = new_req(f"r{index}")
        for step in range(200):
            journal.note(req, ARRIVAL + step, step, "chunk", start=step * 1000, end=step * 1000 + 1000)
        journal.end(req, ARRIVAL, 200)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 100 * MAX_EVENTS * 400


# ---- against a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Happens:
    """A note, or a blocked reason, `steps_later` than the one before."""

    what: str
    is_blocked: bool
    steps_later: int
    number: int


def random_story(rng: random.Random, length: int) -> list[Happens]:
    notes, reasons = ("chunk", "retracted", "admitted"), ("rows", "kv_cache")
    return [
        Happens(rng.choice(notes), is_blocked=False, steps_later=1, number=number)
        if rng.random() < 0.5
        else Happens(rng.choice(reasons), is_blocked=True, steps_later=rng.randint(0, 2), number=number)
        for number in range(length)
    ]


def told_in_full(story: list[Happens]) -> list[tuple[int, str, dict[str, object]]]:
    """What the journal should tell, had it no bound: step, what, numbers."""
    told: list[tuple[int, str, dict[str, object]]] = []
    blocked: dict[str, dict[str, object]] = {}
    step = 0
    for each in story:
        step += each.steps_later
        if not each.is_blocked:
            blocked = {}
            told.append((step, each.what, {"number": each.number}))
        elif each.what in blocked:
            numbers = blocked[each.what]
            seconds = float(step) - next(first for first, _, other in told if other is numbers)
            steps = int(str(numbers["steps"])) + (numbers["last_step"] != step)
            numbers |= {"number": each.number, "steps": steps, "last_step": step, "for_seconds": seconds}
        else:
            numbers = {"reason": each.what, "steps": 1, "last_step": step, "for_seconds": 0.0, "number": each.number}
            blocked[each.what] = numbers
            told.append((step, "blocked", numbers))
    return told


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.one_of(st.integers(0, 40), st.integers(100, 300)))
def test_every_story_is_bounded_in_order_and_complete_up_to_what_it_says_it_omits(
    rng: random.Random, length: int
) -> None:
    story = random_story(rng, length)
    journal, req, step = Journal(), new_req(), 0
    for each in story:
        step += each.steps_later
        if each.is_blocked:
            journal.blocked(req, ARRIVAL + step, step, each.what, number=each.number)
        else:
            journal.note(req, ARRIVAL + step, step, each.what, number=each.number)
    events = [(event.step, event.what, event.numbers) for event in journal.explain("a")[1]]
    expected = told_in_full(story)
    assert len(events) <= MAX_EVENTS + 2, "what blocks it now comes on top"
    omitted = [place for place, event in enumerate(events) if event[1] == "omitted"]
    if not omitted:
        assert events == expected
    else:
        (place,) = omitted
        num_omitted = int(events[place][2]["events"])
        assert events[:place] == expected[:place]
        assert events[place + 1 :] == expected[place + num_omitted :]
