"""The budgets of one step, one at a time."""

from random import Random

import pytest

from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult
from millstream.scheduler.req import Range
from tests.scheduler.admission_set_up import add, cache, make_adder, make_req, random_prompt, run
from tests.scheduler.harness import Harness


def test_a_whole_prompt_is_charged_to_every_budget() -> None:
    adder = make_adder(PagePool(20, 4))
    req = make_req(10, 7)
    assert add(adder, req) is AddReqResult.CONTINUE
    assert req.extend_range == Range(0, 10)
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (52, 988)
    assert adder.rem_total_tokens == (20 - 3) * 4 - 7 - 4


def test_running_requests_are_charged_a_share_of_what_they_may_still_produce() -> None:
    running = [make_req(4, 20), make_req(4, 30, ignore_eos=True)]
    assert make_adder(PagePool(20, 4), running).rem_total_tokens == 80 - 10 - 30


def test_the_estimate_of_an_output_is_clipped() -> None:
    pool = PagePool(2000, 4)
    assert make_adder(pool, [make_req(4, 100_000)], ratio=1.0).rem_total_tokens == 8000 - CLIP_MAX_NEW_TOKENS


def test_decode_rows_count_against_the_step_budgets() -> None:
    adder = make_adder(PagePool(20, 4), chunk=32, num_decodes=6)
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (26, 994)


def test_a_prompt_over_the_chunk_budget_is_cut_at_a_page_and_reserves_no_output() -> None:
    adder = make_adder(PagePool(40, 4), chunk=30)
    req = make_req(50)
    assert add(adder, req) is AddReqResult.OTHER  # two tokens are left, and no page
    assert req.extend_range == Range(0, 28)
    assert adder.new_chunked_req is req
    assert adder.rem_total_tokens == (40 - 7) * 4


def test_a_second_prompt_is_not_cut() -> None:
    adder = make_adder(PagePool(100, 4), chunk=30)
    add(adder, make_req(50))
    adder.rem_chunk_tokens = 20
    assert add(adder, make_req(50, first=100)) is AddReqResult.OTHER
    assert len(adder.can_run_list) == 1


def test_a_chunked_request_goes_on_to_its_end() -> None:
    pool = PagePool(40, 4)
    req = make_req(50)
    add(make_adder(pool, chunk=30), req)
    adder = make_adder(pool, chunk=30)
    adder.add_chunked_req(req)
    assert req.extend_range == Range(28, 50)
    assert adder.new_chunked_req is None
    assert adder.rem_total_tokens == (40 - 13) * 4 - 10 - 4


def test_a_chunked_request_takes_the_pages_that_there_are() -> None:
    pool = PagePool(13, 4)
    req = make_req(50)
    add(make_adder(pool, chunk=16), req)
    assert pool.alloc(7) is not None
    adder = make_adder(pool, chunk=30)
    assert adder.add_chunked_req(req) is AddReqResult.NO_TOKEN
    assert req.extend_range == Range(16, 24)
    stalled = make_adder(pool, chunk=30)
    assert stalled.add_chunked_req(req) is AddReqResult.NO_TOKEN
    assert (stalled.can_run_list, stalled.new_chunked_req) == ([], req)


def test_no_memory_is_no_token_and_unlocks_the_prefix_again() -> None:
    pool = PagePool(10, 4)
    running = make_req(4, 30, first=100, ignore_eos=True)
    adder = make_adder(pool, [running])
    assert add(adder, make_req(8)) is AddReqResult.NO_TOKEN
    assert adder.can_run_list == []
    assert pool.num_available_pages == 10


def test_its_own_cached_prefix_does_not_count_as_memory_for_a_candidate() -> None:
    pool = PagePool(10, 4)
    cache(pool, list(range(24)))
    running = make_req(4, 8, first=100, ignore_eos=True)
    adder = make_adder(pool, [running])
    assert adder.rem_total_tokens == 40 - 8
    assert add(adder, make_req(26, 3)) is AddReqResult.NO_TOKEN  # 2 + 3 + 4 tokens do not fit in 16 - 8
    assert add(adder, make_req(26, 1)) is not AddReqResult.OTHER
    assert len(adder.can_run_list) == 1


def test_when_nothing_runs_a_request_that_fits_exactly_is_admitted() -> None:
    adder = make_adder(PagePool(5, 4))
    assert add(adder, make_req(10, 11)) is AddReqResult.NO_TOKEN  # the verdict is about the next one
    assert len(adder.can_run_list) == 1


def test_the_input_budget_used_up_is_other() -> None:
    adder = make_adder(PagePool(50, 4), max_input=12)
    assert add(adder, make_req(10)) is AddReqResult.OTHER


@pytest.mark.parametrize("max_requests", [1, 3])
def test_rows_used_up_is_other(max_requests: int) -> None:
    adder = make_adder(PagePool(50, 4), max_requests=max_requests)
    verdicts = [add(adder, make_req(4, first=10 * i)) for i in range(max_requests)]
    assert verdicts[-1] is AddReqResult.OTHER
    assert set(verdicts[:-1]) <= {AddReqResult.CONTINUE}


def test_step_budgets_are_charged_whole_pages_and_never_fall_below_zero() -> None:
    adder = make_adder(PagePool(50, 4), chunk=None, max_input=16)
    assert add(adder, make_req(5)) is AddReqResult.CONTINUE
    assert adder.rem_input_tokens == 8
    adder = make_adder(PagePool(50, 4), chunk=None, max_input=16)
    add(adder, make_req(30))
    assert adder.rem_input_tokens == 0
    adder = make_adder(PagePool(50, 4), chunk=16)
    add(adder, make_req(14))
    assert adder.rem_chunk_tokens == 0


@pytest.mark.parametrize("attention_len", [50.0, 1000.0, 1e9])
def test_tokens_count_the_more_the_later_they_are_in_their_prompt(attention_len: float) -> None:
    rng = Random(0)
    for _ in range(50):
        pool, budget = PagePool(1000, 4), rng.uniform(4, 400)
        adder = make_adder(pool, chunk=budget, attention_len=attention_len)
        cache(pool, list(range(rng.randrange(300))))
        reqs = [make_req(rng.randint(1, 400), first=first) for first in (0, 500, 1000)]
        for req in reqs:
            add(adder, req)
        used = sum(sum(1 + each / attention_len for each in range(*req.extend_range)) for req in adder.can_run_list)
        start, end = reqs[0].extend_range
        assert used <= max(budget, 4 * (1 + (start + 4) / attention_len)) + 1e-6
        if adder.new_chunked_req is reqs[0]:
            assert used + 5 * (1 + (end + 5) / attention_len) > budget


def test_however_late_in_its_prompt_the_first_row_of_a_step_gets_a_page() -> None:
    pool, req = PagePool(200, 4), make_req(400)
    pool.init_next_round_input(req)
    pool.grow(req, 300)
    adder = make_adder(pool, chunk=4.0, attention_len=10.0)
    adder.add_chunked_req(req)
    assert req.extend_range == Range(300, 304)


def test_a_prompt_whose_whole_pages_exceed_the_chunk_budget_is_cut() -> None:
    adder = make_adder(PagePool(50, 4), chunk=14)
    req = make_req(14)
    add(adder, req)
    assert req.extend_range == Range(0, 12)


def test_without_chunks_a_later_prompt_that_would_use_up_the_input_budget_waits() -> None:
    adder = make_adder(PagePool(50, 4), chunk=None, max_input=16)
    assert add(adder, make_req(4)) is AddReqResult.CONTINUE
    assert add(adder, make_req(12, first=100)) is AddReqResult.OTHER
    assert adder.why == "input budget"


def test_chunks_end_on_absolute_page_boundaries_on_top_of_a_cached_prefix() -> None:
    pool = PagePool(50, 4)
    cache(pool, list(range(12)))
    adder = make_adder(pool, chunk=10)
    req = make_req(40)
    add(adder, req)
    assert req.extend_range == Range(12, 20)


def test_pages_that_steps_in_flight_give_back_make_the_verdict_other() -> None:
    pool = PagePool(10, 4)
    running = run(pool, make_req(4, 8, first=100, ignore_eos=True))
    ending = run(pool, make_req(20, 8, first=200))
    adder = make_adder(pool, [running], ending=[ending])
    assert adder.pending_tokens == 20
    assert add(adder, make_req(12, 6)) is AddReqResult.OTHER  # 12 + 6 + 4 of 16 - 8, and 20 are pending
    assert (adder.why, adder.numbers["lacking"]) == ("memory", 14)
    assert add(adder, make_req(20, 6)) is AddReqResult.NO_TOKEN
    assert pool.tree_cache.protected_pages == 0


def test_a_shared_prefix_of_ending_requests_is_pending_only_when_nobody_else_uses_it() -> None:
    pool = PagePool(20, 4)
    cache(pool, list(range(16)))
    first = run(pool, make_req(18))
    second = run(pool, make_req(18))
    assert make_adder(pool, [first], ending=[second]).pending_tokens == 4
    assert make_adder(pool, [], ending=[first, second]).pending_tokens == 16 + 2 * 4


def test_a_request_that_resumes_reserves_what_it_has_not_put_out_yet() -> None:
    adder = make_adder(PagePool(20, 4))
    req = make_req(10, 7)
    req.token_ids.extend([1, 2, 3])
    req.reset_cache_state()
    add(adder, req)
    assert req.extend_range == Range(0, 13)
    assert adder.rem_total_tokens == (20 - 4) * 4 - 4 - 4


class LeakyPool(PagePool):
    """Promises more pages than it gives."""

    def alloc(self, num_pages: int) -> list[int] | None:
        return None if num_pages else []


def test_an_allocation_that_fails_after_all_is_no_token_and_leaves_nothing_behind() -> None:
    pool = LeakyPool(20, 4)
    cached = PagePool(20, 4)
    cache(cached, list(range(8)))
    pool.tree_cache, pool.allocator = cached.tree_cache, cached.allocator
    adder = make_adder(pool)
    budgets = (adder.rem_total_tokens, adder.rem_chunk_tokens, adder.rem_input_tokens)
    req = make_req(14)
    assert add(adder, req) is AddReqResult.NO_TOKEN
    assert (adder.can_run_list, adder.new_chunked_req, adder.is_alone) == ([], None, True)
    assert (adder.rem_total_tokens, adder.rem_chunk_tokens, adder.rem_input_tokens) == budgets
    assert pool.tree_cache.protected_pages == 0
    assert req.is_queued


def test_a_chunk_whose_allocation_fails_stays_the_chunked_request() -> None:
    pool = PagePool(20, 4)
    req = make_req(50)
    add(make_adder(pool, chunk=16), req)
    leaky = LeakyPool(20, 4)
    leaky.tree_cache, leaky.allocator = pool.tree_cache, pool.allocator
    adder = make_adder(leaky, chunk=16)
    assert adder.add_chunked_req(req) is AddReqResult.NO_TOKEN
    assert (adder.can_run_list, adder.new_chunked_req, req.kv_allocated_len) == ([], req, 16)


# ---- known lifetimes -----------------------------------------------------------------------------------------------


def test_a_known_lifetime_is_admitted_where_others_end_in_time() -> None:
    pool = PagePool(30, 1)
    early = run(pool, make_req(12, 2, first=100, ignore_eos=True))
    # 18 are free; 1 more for `early`, which gives 12 back after 2 steps: 4 + 20 tokens fit, though 18 - 2 < 24
    assert add(make_adder(pool, [early]), make_req(4, 20)) is AddReqResult.NO_TOKEN
    adder = make_adder(pool, [early])
    add(adder, make_req(4, 20, ignore_eos=True))
    assert len(adder.can_run_list) == 1


def test_a_known_lifetime_is_refused_where_memory_would_run_out_before_others_end() -> None:
    pool = PagePool(30, 1)
    late = run(pool, make_req(12, 9, first=100, ignore_eos=True))
    adder = make_adder(pool, [late])
    assert add(adder, make_req(4, 20, ignore_eos=True)) is AddReqResult.NO_TOKEN
    add(adder, make_req(4, 3, first=50, ignore_eos=True))
    assert len(adder.can_run_list) == 1


def test_what_a_known_lifetime_admitted_in_this_step_needs_counts_for_the_next() -> None:
    pool = PagePool(30, 1)
    early = run(pool, make_req(12, 2, first=100, ignore_eos=True))
    adder = make_adder(pool, [early])
    add(adder, make_req(4, 20, ignore_eos=True))
    assert add(adder, make_req(4, 20, first=50, ignore_eos=True)) is AddReqResult.NO_TOKEN


def test_a_known_output_over_the_clip_is_never_taken_for_a_shorter_one() -> None:
    pool = PagePool(CLIP_MAX_NEW_TOKENS + 100, 1)
    running = run(pool, make_req(4, 4, first=100, ignore_eos=True))
    assert add(make_adder(pool, [running]), make_req(4, CLIP_MAX_NEW_TOKENS + 50)) is AddReqResult.CONTINUE
    exact = make_req(4, CLIP_MAX_NEW_TOKENS + 95, first=50, ignore_eos=True)
    assert add(make_adder(pool, [running]), exact) is AddReqResult.NO_TOKEN


def test_known_lifetimes_count_the_page_that_each_of_the_others_has_to_begin() -> None:
    pool = PagePool(4, 16)
    running = [run(pool, make_req(16, 2, first=100 * i, ignore_eos=True)) for i in (1, 2)]
    adder = make_adder(pool, running)
    add(adder, make_req(1, 1, ignore_eos=True))
    assert not adder.can_run_list  # 2 pages are free, and the others will need both


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_requests_whose_lifetimes_are_known_are_never_retracted(page_size: int, disable_radix_cache: bool) -> None:
    num_at_once = 0
    for seed in range(12):
        rng = Random(seed)
        harness = Harness(
            num_pages=240 // page_size,
            page_size=page_size,
            chunked_prefill_size=rng.choice([-1, 16, 64]),
            disable_radix_cache=disable_radix_cache,
            check_every=50,
        )
        for i in range(25):
            prompt = [*random_prompt(Random(i % 3), rng.choice([0, 20])), *random_prompt(rng, rng.randint(1, 40))]
            harness.ask(f"r{i}", prompt, rng.randint(1, 60), ignore_eos=True)
            for _ in range(rng.randrange(4)):
                harness.step()
            num_at_once = max(num_at_once, len(harness.state.running_batch))
        harness.run()
        assert harness.state.stats.num_retractions == 0
    assert num_at_once >= 4
