"""What a step is made of: mixed batches, chunks, budgets, order, shared prefixes, overlap."""

import msgspec

from millstream.common.batch_messages import ScheduleBatch
from millstream.common.messages import unpack_int32
from millstream.scheduler.prefix_sharing import still_waits
from millstream.scheduler.req import Range, ReqStatus
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness


def extends_of(batch: ScheduleBatch) -> list[tuple[int, int]]:
    return list(zip(unpack_int32(batch.extend_starts), unpack_int32(batch.extend_ends), strict=True))


def num_decodes(batch: ScheduleBatch) -> int:
    return len(unpack_int32(batch.decode_rows))


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % VOCAB_SIZE for i in range(length)]


def test_a_long_prompt_is_computed_in_chunks_that_end_on_pages() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=10)
    client = harness.ask("r", prompt_of(23), 2)
    harness.run()
    assert [extends_of(batch) for batch in harness.batches[:3]] == [[(0, 8)], [(8, 16)], [(16, 23)]]
    assert client.output_ids == reference_outputs(prompt_of(23), VOCAB_SIZE, 2)


def test_two_chunks_of_one_prompt_may_be_in_flight() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=8)
    harness.ask("r", prompt_of(30), 2)
    assert harness.plan()
    assert harness.plan()
    assert not harness.plan()
    assert harness.req("r").extend_range == Range(8, 16)
    assert harness.req("r").kv_committed_len == 0
    assert harness.req("r").kv_allocated_len == 16


def test_a_chunk_and_all_running_decodes_share_a_step() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=16)
    for i in range(3):
        harness.ask(f"short{i}", prompt_of(4, i + 1), 30)
    harness.step()
    harness.ask("long", prompt_of(60), 2)
    while harness.req("long").status is not ReqStatus.RUNNING:
        harness.step()
    mixed = [batch for batch in harness.batches if extends_of(batch) and num_decodes(batch)]
    assert [num_decodes(batch) for batch in mixed] == [3] * 5
    assert [extends_of(batch) for batch in mixed] == [[(0, 12)], [(12, 24)], [(24, 36)], [(36, 48)], [(48, 60)]]


def test_prefill_gets_a_page_of_each_step_however_many_decodes_run() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=8, num_pages=200)
    for i in range(7):
        harness.ask(f"short{i}", prompt_of(2, i + 1), 40)
        harness.step()
    harness.ask("long", prompt_of(12), 2)
    harness.run()
    assert [(0, 4)] in [extends_of(batch) for batch in harness.batches if num_decodes(batch) == 7]


def test_only_one_request_is_computed_in_part() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=24)
    harness.ask("a", prompt_of(20), 2)
    harness.ask("b", prompt_of(20, 1), 2)
    harness.ask("c", prompt_of(20, 2), 2)
    harness.plan()
    assert [harness.req(rid).status for rid in "abc"] == [ReqStatus.RUNNING, ReqStatus.PREFILLING, ReqStatus.WAITING]
    assert harness.scheduler.state.chunked_req is harness.req("b")
    harness.run()


def test_a_short_prompt_fits_beside_the_rest_of_a_long_one() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=24)
    harness.ask("long", prompt_of(30), 2)
    harness.ask("short", prompt_of(5, 1), 2)
    harness.plan()
    harness.plan()
    assert extends_of(harness.batches[1]) == [(24, 30), (0, 5)]


def test_without_chunking_the_first_prompt_may_exceed_the_input_budget_and_the_next_waits() -> None:
    harness = Harness(chunked_prefill_size=-1, max_prefill_tokens=16)
    harness.ask("a", prompt_of(30), 2)
    harness.ask("b", prompt_of(3, 1), 2)
    harness.plan()
    assert extends_of(harness.batches[0]) == [(0, 30)]
    harness.plan()
    assert extends_of(harness.batches[1]) == [(0, 3)]


def test_requests_start_in_the_order_of_their_arrival() -> None:
    harness = Harness(max_running_requests=1)
    harness.ask("late", [1, 2], 2, arrival=5.0)
    harness.ask("early", [3, 4], 2, arrival=4.0)
    harness.plan()
    assert harness.batches[0].new_reqs[0].rid == "early"


def test_a_request_without_memory_is_passed_only_by_one_that_ends_before_it_could_start() -> None:
    harness = Harness(num_pages=16, page_size=4)
    harness.ask("running", prompt_of(20), 20)
    harness.ask("big", prompt_of(40, 1), 20)
    harness.ask("long", prompt_of(3, 2), 25)
    harness.ask("short", prompt_of(3, 3), 2)
    harness.plan()
    assert [new_req.rid for new_req in harness.batches[0].new_reqs] == ["running", "short"]
    assert [req.rid for req in harness.state.waiting_queue] == ["big", "long"]
    harness.run()
    started = [new_req.rid for batch in harness.batches for new_req in batch.new_reqs]
    assert started == ["running", "short", "big", "long"]


def test_a_row_is_used_again_with_a_higher_generation() -> None:
    harness = Harness(max_running_requests=1)
    for i in range(3):
        harness.ask(f"r{i}", prompt_of(3, i), 2)
    harness.run()
    news = [new_req for batch in harness.batches for new_req in batch.new_reqs]
    assert [(new_req.row, new_req.generation) for new_req in news] == [(0, 1), (0, 2), (0, 3)]


def test_the_last_prompt_token_is_always_computed() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", prompt_of(12), 1)
    harness.run()
    client = harness.ask("again", prompt_of(12), 1)
    harness.run()
    assert client.cached_tokens == 8
    assert extends_of(harness.batches[-1]) == [(8, 12)]
    assert client.output_ids == harness.clients["first"].output_ids


def test_the_next_turn_finds_prompt_and_output_in_the_cache() -> None:
    harness = Harness(page_size=4)
    first = harness.ask("first", prompt_of(10), 11)
    harness.run()
    turn = [*prompt_of(10), *first.output_ids, 1, 2, 3]
    client = harness.ask("next", turn, 2)
    harness.run()
    assert client.cached_tokens == 20
    assert client.output_ids == reference_outputs(turn, VOCAB_SIZE, 2)


def test_two_salts_share_nothing() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", prompt_of(12), 1, cache_salt="a")
    harness.run()
    assert harness.ask("again", prompt_of(12), 1, cache_salt="b").cached_tokens == 0
    harness.run()
    assert harness.clients["again"].cached_tokens == 0


def test_who_shares_a_prefix_that_is_being_computed_waits_for_its_pages() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", [*prompt_of(40), 1], 8)
    follower = harness.ask("follower", [*prompt_of(38), 3, 3, 3, 3], 8)
    other = harness.ask("other", prompt_of(6, 7), 8)
    harness.plan()
    assert [new_req.rid for new_req in harness.batches[0].new_reqs] == ["first", "other"]
    harness.plan()
    assert not harness.batches[1].new_reqs
    assert still_waits(harness.req("follower"), 4)
    harness.answer()
    assert not still_waits(harness.req("follower"), 4)
    harness.plan()
    assert [new_req.rid for new_req in harness.batches[2].new_reqs] == ["follower"]
    harness.run()
    assert follower.cached_tokens == 36
    assert other.ends


def test_a_short_shared_prefix_is_not_worth_waiting_for() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", [*prompt_of(30), 1, 2, 3], 8)
    harness.ask("second", [*prompt_of(30), 4, 5, 6], 8)
    harness.plan()
    assert len(harness.batches[0].new_reqs) == 2


def test_who_waits_for_a_chunked_prefix_starts_as_soon_as_its_part_is_there() -> None:
    harness = Harness(page_size=4, chunked_prefill_size=48, num_pages=100)
    harness.ask("first", prompt_of(150), 4)
    follower = harness.ask("follower", [*prompt_of(44), 1, 1, 1, 1], 4)
    harness.run()
    assert follower.cached_tokens == 44
    started = next(i for i, batch in enumerate(harness.batches) if i and batch.new_reqs)
    assert extends_of(harness.batches[started]) == [(144, 150), (44, 48)]


def test_a_follower_does_not_wait_for_one_that_was_aborted() -> None:
    harness = Harness(page_size=4)
    harness.ask("first", prompt_of(40), 8)
    follower = harness.ask("follower", prompt_of(41), 8)
    harness.plan()
    harness.abort("first")
    harness.run()
    assert follower.output_ids == reference_outputs(prompt_of(41), VOCAB_SIZE, 8)


def test_pages_that_another_request_cached_first_stay_private_until_the_end() -> None:
    harness = Harness(page_size=4)
    harness.ask("a", prompt_of(20), 8)
    harness.ask("b", prompt_of(20), 8)  # 20 tokens are too few to wait for
    harness.step()
    assert not harness.req("a").is_private
    assert harness.req("b").is_private
    table = harness.req("b").page_ids.copy()
    harness.step()
    assert harness.req("b").page_ids[: len(table)] == table
    harness.run()
    assert harness.scheduler.state.pool.tree_cache.evictable_pages == 6


def test_a_decode_step_is_planned_before_the_token_that_it_feeds_is_known() -> None:
    harness = Harness()
    harness.ask("r", [1, 2, 3], 4)
    harness.plan()
    assert harness.plan()
    assert num_decodes(harness.batches[1]) == 1
    assert harness.clients["r"].output_ids == []


def test_with_overlap_off_a_step_is_planned_after_the_one_before_has_returned() -> None:
    harness = Harness(disable_overlap_schedule=True)
    harness.ask("r", [1, 2, 3], 4)
    assert harness.plan()
    assert not harness.plan()
    harness.answer()
    assert harness.plan()


def test_a_steady_decode_step_of_64_requests_is_small() -> None:
    harness = Harness(num_pages=512, page_size=16, max_running_requests=64)
    for i in range(64):
        harness.ask(f"r{i}", prompt_of(5, i), 60)
    for _ in range(20):
        harness.step()
    sizes = [len(msgspec.msgpack.encode(batch)) for batch in harness.batches[6:20]]
    assert num_decodes(harness.batches[10]) == 64
    assert max(sizes) < 2000
