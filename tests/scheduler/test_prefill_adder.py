"""The budgets of one step, one at a time."""

from array import array

import pytest

from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from millstream.scheduler.req import Range, Req


def make_req(num_tokens: int, max_new_tokens: int = 10, *, first: int = 0, ignore_eos: bool = False) -> Req:
    token_ids = array("i", range(first, first + num_tokens))
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    message = TokenizedGenerateReqInput(f"r{first}", "http", 0.0, pack_int32(token_ids), params)
    return Req(message, token_ids, max_new_tokens)


def make_adder(
    pool: PagePool,
    running: list[Req] | None = None,
    *,
    ratio: float = 0.5,
    chunk: int | None = 64,
    max_input: int = 1000,
    num_decodes: int = 0,
    max_requests: int = 100,
) -> PrefillAdder:
    return PrefillAdder(
        pool,
        running or [],
        ratio,
        rem_input_tokens=max_input,
        rem_chunk_tokens=chunk,
        num_mixed_decode_tokens=num_decodes,
        prefill_max_requests=max_requests,
    )


def add(adder: PrefillAdder, req: Req) -> AddReqResult:
    adder.pool.init_next_round_input(req)
    return adder.add_one_req(req)


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
    assert add(adder, req) is AddReqResult.CONTINUE
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
    key = array("i", range(24)).tobytes()
    page_ids = pool.alloc(6)
    assert page_ids is not None
    pool.tree_cache.insert(pool.tree_cache.root, (None, None), key, page_ids)
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
