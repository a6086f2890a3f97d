"""n answers to one prompt: one of them computes it, and each lives on alone."""

import pytest

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from millstream.common.messages import unpack_int32
from millstream.scheduler.fan_out import child_seed
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

PROMPT = [5, 6, 7, 8, 9, 10, 11]  # a page of 4 and part of another: far below what strangers wait for


def answers(harness: Harness, n: int, rid: str = "a") -> list[list[int]]:
    return [harness.clients[f"{rid}-{index}"].output_ids for index in range(n)]


def num_prefill_tokens(harness: Harness) -> int:
    ranges = [(unpack_int32(batch.extend_starts), unpack_int32(batch.extend_ends)) for batch in harness.batches]
    return sum(sum(ends) - sum(starts) for starts, ends in ranges)


def test_the_first_answer_computes_the_prompt_and_the_others_the_last_partial_page() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, n=4)
    harness.run()
    assert answers(harness, 4) == [reference_outputs(PROMPT, VOCAB_SIZE, 8)] * 4
    assert num_prefill_tokens(harness) == 7 + 3 * 3
    cached = [harness.clients[f"a-{index}"].cached_tokens for index in range(4)]
    assert cached == [0, 4, 4, 4]


def test_a_long_prompt_in_chunks_is_computed_once() -> None:
    harness = Harness(chunked_prefill_size=16)
    prompt = [i % 40 for i in range(101)]
    harness.ask("a", prompt, 3, n=3)
    harness.run()
    assert answers(harness, 3) == [reference_outputs(prompt, VOCAB_SIZE, 3)] * 3
    assert num_prefill_tokens(harness) == 101 + 2 * 1


def test_each_child_has_its_own_seed_and_the_first_keeps_the_requests() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, n=3)
    harness.step()
    harness.step()
    seeds = [harness.req(f"a-{index}").message.sampling_params.seed for index in range(3)]
    assert seeds == [child_seed(7, index) for index in range(3)]
    assert seeds[0] == 7
    assert len({child_seed(seed, index) for seed in range(50) for index in range(16)}) == 800
    assert child_seed(7, 1) == -3627764540224900128  # fixed: a seed gives the same answers in every version


def test_aborting_one_answer_leaves_the_others_and_aborting_the_request_ends_all() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, 30, n=3)
    harness.ask("b", [1, 2], 5)
    for _ in range(6):
        harness.step()
    harness.abort("a-1")
    assert [len(harness.clients[f"a-{index}"].ends) for index in range(3)] == [0, 1, 0]
    harness.step()
    harness.abort("a")
    reasons = [harness.clients[f"a-{index}"].ends[0].finish_reason for index in range(3)]
    assert all(isinstance(reason, FINISH_ABORT) for reason in reasons)
    harness.run()
    assert isinstance(harness.clients["b"].ends[0].finish_reason, FINISH_LENGTH)
    assert harness.state.families == {}


def test_the_others_go_on_when_the_first_is_aborted_before_the_prompt_is_computed() -> None:
    harness = Harness(chunked_prefill_size=4)
    harness.ask("a", list(range(20)), 4, n=3)
    harness.step()
    harness.abort("a-0")
    harness.run()
    assert answers(harness, 3)[1:] == [reference_outputs(list(range(20)), VOCAB_SIZE, 4)] * 2
    assert num_prefill_tokens(harness) <= 20 + 8 + 4


def test_answers_are_retracted_alone_when_memory_is_short() -> None:
    harness = Harness(num_pages=12, schedule_conservativeness=0.0)
    harness.ask("a", PROMPT, 30, n=4)
    harness.run()
    assert answers(harness, 4) == [reference_outputs(PROMPT, VOCAB_SIZE, 30)] * 4
    assert harness.state.stats.num_retractions > 0


def test_the_prompt_counts_once_in_the_queue_and_all_or_none_of_the_answers_get_in() -> None:
    harness = Harness(max_queued_requests=5, max_queued_tokens=10)
    harness.ask("a", PROMPT, n=4)
    assert harness.state.waiting_queue.num_tokens == len(PROMPT)
    harness.ask("b", [1, 2], n=2)
    reasons = [harness.clients[f"b-{index}"].ends[0].finish_reason for index in range(2)]
    assert [reason.status_code for reason in reasons if isinstance(reason, FINISH_ABORT)] == [429, 429]
    assert not harness.clients["a-0"].ends
    harness.run()
    assert harness.scheduler.take_snapshot(harness.now).started_tokens_total == len(PROMPT)


@pytest.mark.parametrize("n", [0, 17, 2**40])
def test_a_number_of_answers_that_is_out_of_range_is_refused(n: int) -> None:
    harness = Harness()
    reason = harness.ask("a", PROMPT, n=n).ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert (reason.status_code, "n must be from 1 to 16" in reason.message) == (400, True)
