"""Requests with a grammar: announced, compiled, waited for, ended, freed; and nothing left of them."""

import random
from pathlib import Path
from typing import Any

import pytest

from millstream.common.batch_messages import GrammarReady
from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN, FINISHED_GRAMMAR
from millstream.common.messages import ContinueGenerationReqInput, PauseGenerationReqInput
from millstream.scheduler import grammar_queue
from millstream.scheduler.grammar_queue import MAX_IDLE_CHARS, MAX_IDLE_GRAMMARS
from millstream.scheduler.recording.recording import read_recording
from millstream.scheduler.recording.replay import replay
from millstream.scheduler.recording.schedule_recorder import RecordedScheduler, ScheduleRecorder
from millstream.scheduler.req import ReqStatus
from millstream.scheduler.time_limits import GRAMMAR_SECONDS
from tests.scheduler.fake_worker import BAD_GRAMMAR, GRAMMAR_LENGTH, reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

PROMPT = [3, 1, 4, 1, 5]


def late_harness(**options: Any) -> Harness:
    """One whose grammars are compiled when the test says so."""
    harness = Harness(**options)
    harness.compiles = False
    return harness


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    harness = late_harness()
    client, other = harness.ask("a", PROMPT, 20, grammar="g"), harness.ask("b", PROMPT, 20)
    for _ in range(4):
        harness.step()
    assert harness.req("a").status is ReqStatus.GRAMMAR
    assert len(other.output_ids) > 1
    assert [batch.new_grammars for batch in harness.batches if batch.new_grammars] == [{0: "g"}]
    harness.compile()
    assert harness.req("a").status is ReqStatus.WAITING
    harness.run()
    assert client.output_ids == reference_outputs(PROMPT, VOCAB_SIZE, GRAMMAR_LENGTH)
    assert client.ends[0].finish_reason == FINISHED_GRAMMAR()
    assert isinstance(other.ends[0].finish_reason, FINISH_LENGTH)


def test_a_grammar_is_announced_when_nothing_else_is_to_be_computed() -> None:
    harness = late_harness()
    harness.ask("a", PROMPT, grammar="g")
    assert harness.plan()
    assert harness.batches[0].new_grammars == {0: "g"}
    assert not harness.plan()
    harness.compile()
    harness.run()
    assert [batch.step for batch in harness.batches] == list(range(len(harness.batches)))


@pytest.mark.parametrize("max_new_tokens", [GRAMMAR_LENGTH, GRAMMAR_LENGTH - 1])
def test_a_complete_output_stops_and_a_cut_one_is_as_long_as_it_may(max_new_tokens: int) -> None:
    harness = Harness()
    client = harness.ask("a", PROMPT, max_new_tokens, grammar="g")
    harness.run()
    is_complete = max_new_tokens == GRAMMAR_LENGTH
    assert client.ends[0].finish_reason == (FINISHED_GRAMMAR() if is_complete else FINISH_LENGTH(max_new_tokens))
    assert client.ends[0].num_tokens == len(client.output_ids) == max_new_tokens


def test_the_token_that_ends_a_request_is_told_rather_than_its_grammar() -> None:
    harness, last = Harness(), reference_outputs(PROMPT, VOCAB_SIZE, GRAMMAR_LENGTH)[-1]
    client = harness.ask("a", PROMPT, 20, grammar="g", eos=(last,), min_new_tokens=GRAMMAR_LENGTH - 1)
    harness.run()
    assert client.ends[0].finish_reason == FINISH_MATCHED_TOKEN(last)


def test_a_grammar_that_rank_0_can_not_use_is_the_clients_error() -> None:
    harness = Harness()
    bad, good = harness.ask("a", PROMPT, grammar=BAD_GRAMMAR), harness.ask("b", PROMPT, grammar="g")
    harness.run()
    reason = bad.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert (reason.status_code, reason.message) == (400, "The grammar can not be used: it is bad")
    assert good.ends[0].finish_reason == FINISHED_GRAMMAR()
    assert harness.state.grammar_queue.num_grammars == 1


def test_requests_share_a_grammar_and_the_next_one_need_not_wait() -> None:
    harness = Harness()
    clients = [harness.ask(f"r{index}", [*PROMPT, index], grammar="g") for index in range(5)]
    harness.run()
    harness.ask("later", PROMPT, grammar="g")
    assert harness.req("later").status is ReqStatus.WAITING
    harness.run()
    assert sum(len(batch.new_grammars) for batch in harness.batches) == 1
    assert all(client.ends[0].finish_reason == FINISHED_GRAMMAR() for client in clients)


def test_only_the_last_idle_grammars_are_kept() -> None:
    harness = Harness()
    for index in range(MAX_IDLE_GRAMMARS + 10):
        harness.ask(f"r{index}", PROMPT, 1, grammar=f"g{index}")
        harness.run()
    harness.ask("last", PROMPT, 1)  # the next step tells of those that are freed
    harness.run()
    assert harness.state.grammar_queue.num_grammars == len(harness.worker.grammars) == MAX_IDLE_GRAMMARS


def test_idle_grammars_are_kept_up_to_so_many_characters() -> None:
    harness, num = Harness(), 4
    for index in range(2 * num):
        harness.ask(f"r{index}", PROMPT, 1, grammar=f"{index}" * (MAX_IDLE_CHARS // num))
        harness.run()
    harness.ask("last", PROMPT, 1)
    harness.run()
    assert harness.state.grammar_queue.num_grammars == len(harness.worker.grammars) == num


def test_what_rank_0_holds_is_bounded_and_what_is_beyond_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_HELD_CHARS", 25)
    harness = Harness()
    clients = [harness.ask(f"r{index}", PROMPT, grammar=f"{index}" * 10) for index in range(9)]
    clients.append(harness.ask("long", PROMPT, grammar="long" * 10))
    gone = harness.ask("gone", PROMPT, grammar="gone")
    bad = [harness.ask(f"bad{index}", PROMPT, grammar=BAD_GRAMMAR) for index in range(2)]
    harness.step()
    harness.abort("gone")
    most = 0
    while harness.state.requests:
        harness.step()
        most = max(most, len(harness.worker.grammars))
    assert most == 2
    assert all(client.ends[0].finish_reason == FINISHED_GRAMMAR() for client in clients)
    assert all(isinstance(client.ends[0].finish_reason, FINISH_ABORT) for client in (gone, *bad))
    assert not list(harness.state.grammar_queue.broken_invariants())
    assert harness.state.grammar_queue.num_grammars <= 2


def test_after_a_row_has_failed_its_grammar_is_compiled_anew_for_the_next() -> None:
    harness = Harness(failing_token_id=7)
    failed = harness.ask("a", [3, 7], grammar="g")
    beside = harness.ask("b", PROMPT, grammar="g")
    harness.run()
    assert isinstance(failed.ends[0].finish_reason, FINISH_ABORT)
    assert beside.ends[0].finish_reason == FINISHED_GRAMMAR()
    again = harness.ask("c", PROMPT, grammar="g")
    harness.run()
    assert again.ends[0].finish_reason == FINISHED_GRAMMAR()
    assert [batch.new_grammars for batch in harness.batches if batch.new_grammars] == [{0: "g"}, {1: "g"}]
    assert list(harness.worker.grammars) == [1]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_aborted_while_its_grammar_is_compiled(is_compiled: bool) -> None:
    harness = late_harness()
    client = harness.ask("a", PROMPT, grammar="g")
    harness.step()
    harness.abort("a")
    assert isinstance(client.ends[0].finish_reason, FINISH_ABORT)
    assert not harness.state.requests
    if is_compiled:
        harness.compile()
    again = harness.ask("b", PROMPT, grammar="g")
    harness.compiles = True
    harness.run()
    assert again.ends[0].finish_reason == FINISHED_GRAMMAR()


def test_a_grammar_that_is_never_ready_ends_its_requests_in_time() -> None:
    harness = late_harness()
    client = harness.ask("a", PROMPT, grammar="g")
    harness.step()
    assert harness.scheduler.next_deadline() == pytest.approx(harness.now + GRAMMAR_SECONDS)
    harness.now += GRAMMAR_SECONDS
    harness.plan()
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert reason.status_code == 503
    assert harness.scheduler.take_snapshot(harness.now).grammar_timeouts_total == 1


def test_a_limit_on_the_grammar_is_none_on_what_comes_after() -> None:
    harness = Harness()
    client = harness.ask("a", PROMPT, grammar="g")
    harness.step()
    harness.now += GRAMMAR_SECONDS + 1
    harness.run()
    assert client.ends[0].finish_reason == FINISHED_GRAMMAR()


def test_a_pause_does_not_keep_a_grammar_from_being_compiled() -> None:
    harness = Harness()
    harness.control(PauseGenerationReqInput("p", "http"))
    harness.ask("a", PROMPT, grammar="g")
    harness.step()
    assert harness.req("a").status is ReqStatus.WAITING
    harness.control(ContinueGenerationReqInput("c", "http"))
    harness.run()


def test_requests_that_wait_for_a_grammar_count_in_the_queues_bounds() -> None:
    harness = late_harness(max_queued_requests=2)
    clients = [harness.ask(f"r{index}", PROMPT, grammar="g") for index in range(3)]
    assert [bool(client.ends) for client in clients] == [False, False, True]
    assert harness.scheduler.take_snapshot(harness.now).num_grammar_queue_reqs == 2


def test_an_unknown_or_repeated_answer_changes_nothing() -> None:
    harness = late_harness()
    client = harness.ask("a", PROMPT, grammar="g")
    harness.step()
    for message in (GrammarReady(7), GrammarReady(7, "bad"), GrammarReady(0), GrammarReady(0), GrammarReady(0, "bad")):
        harness.scheduler.handle(message, harness.now)
    harness.worker.take_ready_grammars()
    harness.run()
    assert len(client.ends) == 1
    assert client.output_ids


def test_outputs_and_grammar_outlive_a_retraction() -> None:
    harness = Harness()
    prompts = [[index, index] for index in range(8)]
    clients = [harness.ask(f"r{index}", prompt, grammar="g") for index, prompt in enumerate(prompts)]
    while len(clients[0].output_ids) < 2:
        harness.step()
    harness.control(PauseGenerationReqInput("p", "http", "retract"))
    while harness.results:
        harness.step()
    harness.plan()
    assert harness.state.stats.num_retractions == len(prompts)
    harness.control(ContinueGenerationReqInput("c", "http"))
    harness.run()
    for prompt, client in zip(prompts, clients, strict=True):
        assert client.output_ids == reference_outputs(prompt, VOCAB_SIZE, GRAMMAR_LENGTH)
        assert client.ends[0].finish_reason == FINISHED_GRAMMAR()


def test_several_tokens_a_step_end_with_the_grammar() -> None:
    harness = Harness(decode_width=3)
    client = harness.ask("a", PROMPT, 50, grammar="g")
    harness.run()
    assert client.output_ids == reference_outputs(PROMPT, VOCAB_SIZE, GRAMMAR_LENGTH)


def test_a_recording_with_grammars_replays(tmp_path: Path) -> None:
    harness = Harness()
    path = tmp_path / "steps.jsonl"
    harness.scheduler = RecordedScheduler(harness.scheduler.config, ScheduleRecorder(path, harness.scheduler.config))
    harness.state = harness.scheduler.state
    for index in range(6):
        harness.ask(f"r{index}", [*PROMPT, index], grammar=BAD_GRAMMAR if index == 3 else f"g{index % 2}")
    harness.run()
    harness.scheduler.close()
    report = replay(read_recording(path))
    assert report.difference is None
    assert report.num_decisions > 5


def test_the_explanation_tells_of_the_wait() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, grammar="g")
    harness.run()
    _, events = harness.state.journal.explain("a")
    assert [event.what for event in events][:3] == ["grammar", "queued", "admitted"]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(grammar_queue, "MAX_HELD_CHARS", draw.choice([5, 2**20]))
    harness = late_harness(num_pages=30, page_size=2, max_running_requests=4, disable_overlap_schedule=seed % 2 == 0)
    for index in range(25):
        prompt, grammar = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 9))], f"g{draw.randrange(4)}"
        harness.ask(f"r{index}", prompt, draw.randint(1, 9), grammar=draw.choice([None, grammar, grammar, BAD_GRAMMAR]))
        if draw.random() < 0.3:
            harness.abort(f"r{draw.randrange(index + 1)}")
        if draw.random() < 0.4:
            harness.compile()
        if draw.random() < 0.1:
            harness.now += GRAMMAR_SECONDS / 2
        if draw.random() < 0.1:
            harness.control(PauseGenerationReqInput("p", "http", draw.choice(["retract", "in_place"])))
        if draw.random() < 0.2:
            harness.control(ContinueGenerationReqInput("c", "http"))
        for _ in range(draw.randrange(4)):
            harness.step()
    harness.compiles = True
    harness.control(ContinueGenerationReqInput("c", "http"))
    harness.run()
    assert all(len(client.ends) == 1 for client in harness.clients.values())
    for rid, client in harness.clients.items():
        if client.ends[0].finish_reason == FINISHED_GRAMMAR():
            assert len(client.output_ids) == GRAMMAR_LENGTH, rid
    harness.ask("last", PROMPT, 1)
    harness.run()
    assert harness.state.grammar_queue.num_grammars == len(harness.worker.grammars)
