"""What a worker computes depends on nothing but the request, however it is cut into steps and batches."""

import random
from pathlib import Path

import msgspec
import pytest

from millstream.common.batch_messages import ROW_ERROR
from millstream.common.messages import unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.decoder import Decoder
from millstream.tp_worker.rows import FREE
from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import GREEDY, Driver, load_tiny_worker, read, tiny_args

SEEDED = SamplingParams(temperature=1.3, top_p=0.95, min_p=0.01, seed=1234)
CHANGED = msgspec.structs.replace(
    SEEDED,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.2,
    logit_bias={17: 3.0, 23: -100.0},
    bad_words=((17, 17), (40,)),
)


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids that are the same for a seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 300) for _ in range(length)]


def alone(worker: Worker, input_ids: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """The request's outputs when nothing else runs."""
    driver = Driver(worker)
    driver.add(0, input_ids, params)
    tokens = driver.generate({0: len(input_ids)}, num_tokens)[0]
    driver.free(0)
    assert driver.step() is None
    return tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED, CHANGED])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole_prompt(worker: Worker, params: SamplingParams) -> None:
    ids = prompt(1, 61)
    expected = alone(worker, ids, params, 12)
    driver = Driver(worker)
    driver.add(3, ids, params)
    for span in (range(7), range(7, 8), range(8, 40)):
        chunk = read(driver.step({3: span}))
        assert chunk.tokens == {3: []}
        assert chunk.row_lens == {3: 61}
    tokens = read(driver.step({3: range(40, 61)})).tokens[3]
    for _ in range(11):
        tokens += read(driver.step(decodes=[3])).tokens[3]
    assert tokens == expected


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_31_others(worker: Worker) -> None:
    expected = alone(worker, prompt(1, 20), CHANGED, 16)
    driver = Driver(worker)
    for row in range(32):
        is_ours = row == 17
        others = (SEEDED, CHANGED)[row % 2]
        params = CHANGED if is_ours else msgspec.structs.replace(others, seed=row, temperature=row / 10, top_k=row)
        driver.add(row, prompt(1 if is_ours else row, 20 if is_ours else row + 1), params)
    lengths = {row: 20 if row == 17 else row + 1 for row in range(32)}
    assert driver.generate(lengths, 16)[17] == expected


@pytest.mark.parametrize("limit", [{"temperature": 1e-3}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_every_sampling_parameter_reaches_the_sampler(worker: Worker, limit: dict[str, float]) -> None:
    ids, wild = prompt(6, 15), SamplingParams(temperature=2.0, seed=5)
    greedy, sampled = (alone(worker, ids, params, 8) for params in (GREEDY, wild))
    assert sampled != greedy
    assert alone(worker, ids, msgspec.structs.replace(wild, seed=6), 8) != sampled
    assert alone(worker, ids, msgspec.structs.replace(wild, **limit), 8) == greedy


def test_any_mixture_of_chunks_and_decodes_gives_each_request_its_own_tokens(worker: Worker) -> None:
    draw, driver = random.Random(5), Driver(worker)
    requests = {row: (prompt(row, draw.randint(1, 70)), (GREEDY, SEEDED, CHANGED)[row % 3]) for row in range(8)}
    expected = {row: alone(worker, ids, params, 10) for row, (ids, params) in requests.items()}
    computed, outputs = dict.fromkeys(requests, 0), {row: list[int]() for row in requests}
    for row, (ids, params) in requests.items():
        driver.add(row, ids, params)
    while min(map(len, outputs.values())) < 10:
        extends, decodes = {}, []
        for row in draw.sample(sorted(requests), draw.randint(1, 8)):
            length = len(requests[row][0])
            if computed[row] < length:
                end = draw.randint(computed[row] + 1, length)
                extends[row], computed[row] = range(computed[row], end), end
            elif len(outputs[row]) < 10:
                decodes.append(row)
        for row, tokens in read(driver.step(extends, decodes)).tokens.items() if extends or decodes else ():
            outputs[row] += tokens
    assert outputs == expected


@pytest.mark.parametrize("params", [SEEDED, CHANGED])
def test_a_retracted_request_goes_on_as_if_nothing_had_happened(worker: Worker, params: SamplingParams) -> None:
    ids = prompt(9, 30)
    expected = alone(worker, ids, params, 15)
    driver = Driver(worker)
    driver.add(0, ids, params)
    outputs = driver.generate({0: 30}, 6)[0]
    driver.free(0)
    driver.add(0, ids + outputs, params, generation=2, prompt_len=30)
    outputs += driver.generate({0: 36}, 9)[0]
    assert outputs == expected


def test_cached_pages_stand_for_the_tokens_that_filled_them(worker: Worker) -> None:
    ids = prompt(4, 24)
    expected = alone(worker, ids, GREEDY, 8)
    driver = Driver(worker)
    driver.add(0, ids[:20])
    driver.step({0: range(20)})
    driver.add(1, ids)
    driver.pages[1] = []
    driver._free_pages().extend(driver.pages[0][:5][::-1])  # the same pages, in the same order
    tokens = read(driver.step({1: range(20, 24)})).tokens[1]
    for _ in range(7):
        tokens += read(driver.step(decodes=[1])).tokens[1]
    assert tokens == expected


def test_end_tokens_are_masked_until_min_new_tokens(worker: Worker) -> None:
    ids = prompt(2, 10)
    free_choice = alone(worker, ids, GREEDY, 6)
    end_ids = tuple(set(free_choice))
    driver = Driver(worker)
    driver.add(0, ids, msgspec.structs.replace(GREEDY, min_new_tokens=4), end_token_ids=(*end_ids, 10**6))
    driver.add(1, ids, GREEDY, end_token_ids=end_ids)
    outputs = driver.generate({0: 10, 1: 10}, 6)
    assert not set(outputs[0][:4]) & set(end_ids)
    assert outputs[1] == free_choice


def test_end_tokens_are_allowed_again_after_min_new_tokens_counted_over_a_retraction(worker: Worker) -> None:
    ids, outputs = prompt(2, 10), [5, 6]
    greedy_next = alone(worker, ids + outputs, GREEDY, 1)[0]
    driver = Driver(worker)
    for row, minimum in ((0, 2), (1, 3)):
        params = msgspec.structs.replace(GREEDY, min_new_tokens=minimum)
        driver.add(row, ids + outputs, params, prompt_len=10, end_token_ids=(greedy_next,))
    tokens = driver.generate({0: 12, 1: 12}, 1)
    assert tokens[0] == [greedy_next]
    assert tokens[1] != [greedy_next]


def test_logits_that_are_nan_fail_their_row_alone(worker: Worker) -> None:
    expected = alone(worker, prompt(1, 9), SEEDED, 5)
    driver = Driver(worker)
    driver.add(0, prompt(1, 9), SEEDED)
    driver.add(1, prompt(2, 9), SEEDED)
    outputs = driver.generate({0: 9, 1: 9}, 3)[0]
    assert isinstance(worker._model, Decoder)
    worker._model.kv_caches[0].v[driver.pages[1]] = float("nan")
    for _ in range(2):
        result = driver.step(decodes=[0, 1])
        outcome = read(result)
        outputs += outcome.tokens[0]
        assert outcome.tokens[1] == []
        assert outcome.row_lens[1] == 9 + 3
        assert "NaN" in outcome.errors[1]
        assert result is not None
        assert unpack_int32(result.flags) == [0, ROW_ERROR]
    assert outputs == expected


def test_pages_that_held_nan_do_not_harm_the_next_request(worker: Worker) -> None:
    ids = prompt(3, 17)
    expected = alone(worker, ids, GREEDY, 6)
    assert isinstance(worker._model, Decoder)
    for cache in worker._model.kv_caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    assert alone(worker, ids, GREEDY, 6) == expected


def test_a_batch_without_rows_changes_rows_and_has_no_result(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(5, [1, 2, 3])
    assert driver.step() is None
    assert worker.rows.row_lens[5] == 3
    driver.free(5)
    assert driver.step() is None
    assert worker.rows.generations[5] == FREE


@pytest.mark.parametrize("total_tokens", [1, 3, 16, 700])
def test_the_warm_up_fits_any_cache_and_leaves_no_row_behind(tiny_model: Path, total_tokens: int) -> None:
    args = tiny_args(tiny_model, max_total_tokens=total_tokens, page_size=1, chunked_prefill_size=-1)
    assert (load_tiny_worker(args).rows.generations == FREE).all()
