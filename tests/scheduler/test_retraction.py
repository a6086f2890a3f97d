"""When decodes run out of pages: who steps back, when, and that nobody loses a token."""

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from millstream.common.messages import unpack_int32
from millstream.scheduler.new_token_ratio import NewTokenRatio
from millstream.scheduler.req import ReqStatus
from millstream.scheduler.retraction import retraction_order
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness


def crowded(*, disable_overlap_schedule: bool = False, num_pages: int = 12) -> Harness:
    """Three requests of 4 + 20 tokens in a pool of 48: they fit only at first."""
    harness = Harness(
        num_pages=num_pages,
        page_size=4,
        schedule_conservativeness=0.0,
        disable_overlap_schedule=disable_overlap_schedule,
    )
    for i in range(3):
        harness.ask(f"r{i}", [i, i, i, i], 20)
        harness.step()
    return harness


def run_until_short(harness: Harness) -> None:
    """Step until a running request lacks a page, with all possible steps in flight."""
    for _ in range(100):
        while harness.plan():
            pass
        if harness.scheduler.state.num_missing_pages() > 0:
            return
        harness.answer()
    raise AssertionError("pages were never short")


def test_a_request_is_retracted_and_gives_the_same_tokens() -> None:
    harness = crowded()
    harness.run()
    assert harness.scheduler.state.stats.num_retractions > 0
    for i in range(3):
        client = harness.clients[f"r{i}"]
        assert client.output_ids == reference_outputs([i, i, i, i], VOCAB_SIZE, 20)
        assert client.ends[0].finish_reason == FINISH_LENGTH(20)
    num_retractions = [client.ends[0].stats.num_retractions for client in harness.clients.values()]
    assert sum(num_retractions) == harness.scheduler.state.stats.num_retractions
    assert [client.generation for client in harness.clients.values()] == num_retractions


def test_nobody_is_retracted_while_results_are_in_flight() -> None:
    harness = crowded()
    run_until_short(harness)
    assert harness.results
    while harness.results:
        assert not harness.plan()
        assert harness.scheduler.state.stats.num_retractions == 0
        harness.answer()
    assert harness.plan()
    assert harness.scheduler.state.stats.num_retractions == 1


def test_the_longest_output_is_kept_and_the_others_step_back_shortest_output_first() -> None:
    harness = Harness(num_pages=64)
    for rid, prompt_len in (("a", 4), ("b", 4), ("c", 8), ("d", 4)):
        harness.ask(rid, [1] * prompt_len, 40)
    reqs = [harness.req(rid) for rid in "abcd"]
    for req, num_outputs in zip(reqs, (9, 2, 2, 30), strict=True):
        req.token_ids.extend([1] * num_outputs)
    assert [req.rid for req in retraction_order(reqs)] == ["c", "b", "a", "d"]


def test_a_request_that_was_retracted_three_times_goes_last() -> None:
    harness = Harness()
    for rid, num_retractions in (("a", 3), ("b", 2), ("c", 0)):
        harness.ask(rid, [1, 2], 5)
        harness.req(rid).num_retractions = num_retractions
    harness.req("c").token_ids.append(1)
    reqs = [harness.req(rid) for rid in "abc"]
    assert [req.rid for req in retraction_order(reqs)] == ["b", "c", "a"]


def test_a_retracted_request_waits_ahead_of_those_that_came_later() -> None:
    harness = crowded()
    harness.ask("new", [9] * 20, 20)
    run_until_short(harness)
    while harness.results:
        harness.answer()
    harness.plan()
    waiting = list(harness.state.waiting_queue)
    assert waiting[0].status is ReqStatus.RETRACTED
    assert [req.message.arrival for req in waiting] == sorted(req.message.arrival for req in waiting)
    assert waiting[-1].rid == "new"


def test_rows_sit_a_step_out_when_pages_are_on_their_way_back() -> None:
    lengths = (6, 4, 3)
    harness = Harness(num_pages=9, page_size=4, schedule_conservativeness=0.0)
    for i, length in enumerate(lengths):
        harness.ask(f"r{i}", [i] * length, 12)
        harness.plan()
        harness.answer()
    run_until_short(harness)
    harness.abort("r0")
    harness.answer()
    assert harness.req("r0").status is ReqStatus.ENDING
    assert harness.plan()
    with_a_slot, without = harness.req("r1"), harness.req("r2")
    assert unpack_int32(harness.batches[-1].decode_rows) == [with_a_slot.row]
    assert harness.state.is_in_flight(without)
    harness.run()
    assert harness.scheduler.state.stats.num_retractions == 0
    for i, length in list(enumerate(lengths))[1:]:
        assert harness.clients[f"r{i}"].output_ids == reference_outputs([i] * length, VOCAB_SIZE, 12)


def test_a_request_that_is_prefilled_in_part_is_the_first_to_step_back() -> None:
    harness = Harness(num_pages=18, page_size=4, chunked_prefill_size=8, schedule_conservativeness=0.0)
    for i in range(2):
        harness.ask(f"r{i}", [i, 2, 3, 4], 30)
        harness.step()
    harness.ask("long", [(5 + i * i) % VOCAB_SIZE for i in range(48)], 2)
    while harness.scheduler.state.stats.num_retractions == 0:
        chunked_req = harness.scheduler.state.chunked_req
        harness.step()
    assert chunked_req is harness.req("long")
    assert harness.req("long").num_retractions == 1
    harness.run()
    assert [harness.clients[rid].ends[0].finish_reason for rid in ("r0", "r1")] == [FINISH_LENGTH(30)] * 2
    assert harness.clients["long"].ends[0].finish_reason == FINISH_LENGTH(2)


def test_the_last_request_that_cannot_go_on_ends_alone_and_the_server_goes_on() -> None:
    harness = Harness(num_pages=4, page_size=4)
    client = harness.ask("r", [1, 2, 3, 4], 5)
    harness.req("r").max_new_tokens = 100  # admission would have clamped it to the pool
    harness.req("r").num_left_to_plan = 100
    harness.req("r").max_len = 104
    harness.run()
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert reason.status_code == 500
    assert "16" in reason.message
    assert len(client.output_ids) == 13
    after = harness.ask("after", [5, 6], 3)
    harness.run()
    assert after.ends[0].finish_reason == FINISH_LENGTH(3)


def test_a_retracted_request_resumes_with_its_outputs_and_its_prompt_boundary() -> None:
    harness = crowded()
    harness.run()
    news = [new_req for batch in harness.batches for new_req in batch.new_reqs]
    assert [new_req.rid for new_req in news[:3]] == ["r0", "r1", "r2"]
    resumed = news[3:]
    assert resumed
    for new_req in resumed:
        assert new_req.prompt_len == 4
        assert len(new_req.input_ids) // 4 > 4


def test_the_ratio_decays_over_600_steps_to_its_floor_and_resets_when_idle() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    for _ in range(300):
        ratio.on_decode_step()
    assert abs(ratio.value - (0.7 + 0.7 * 0.14) / 2) < 1e-9
    for _ in range(600):
        ratio.on_decode_step()
    assert ratio.value == 0.7 * 0.14
    ratio.reset()
    assert ratio.value == 0.7


def test_the_ratio_rises_after_a_retraction_and_is_reset_when_idle() -> None:
    harness = crowded()
    run_until_short(harness)
    while harness.results:
        harness.answer()
    harness.plan()
    assert harness.scheduler.state.new_token_ratio.value > 0.5
    harness.run()
    harness.plan()
    assert harness.scheduler.state.new_token_ratio.value == 0.0


def test_overlap_on_and_off_retract_and_give_the_same_tokens() -> None:
    overlap, plain = crowded(), crowded(disable_overlap_schedule=True)
    for harness in (overlap, plain):
        harness.run()
        assert harness.scheduler.state.stats.num_retractions > 0
    assert {rid: each.output_ids for rid, each in overlap.clients.items()} == {
        rid: each.output_ids for rid, each in plain.clients.items()
    }
