"""A bad request is an error of its own row; a batch that contradicts itself ends the server."""

from collections.abc import Callable

import msgspec
import pytest

from millstream.common.batch_messages import ROW_ERROR, NewReq, PageColumns, ScheduleBatch
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.rows import BatchError
from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import GREEDY, Driver, read

GOOD = [11, 12, 13, 14, 15]


def bad_token(driver: Driver) -> range:
    driver.add(1, [1, 2, 300])
    return range(3)


def negative_token(driver: Driver) -> range:
    driver.add(1, [1, -2, 3])
    return range(3)


def bad_temperature(driver: Driver) -> range:
    driver.add(1, GOOD, SamplingParams(temperature=float("nan"), seed=0))
    return range(5)


def bad_prompt_len(driver: Driver) -> range:
    driver.add(1, GOOD, prompt_len=6)
    return range(5)


def too_long(driver: Driver) -> range:
    driver.add(1, [1] * 257)
    return range(257)


def no_tokens(driver: Driver) -> range:
    driver.add(1, [])
    return range(0)


def beyond_what_is_known(driver: Driver) -> range:
    driver.add(1, GOOD)
    return range(6)


def negative_start(driver: Driver) -> range:
    driver.add(1, GOOD)
    return range(-1, 5)


def nothing_to_compute(driver: Driver) -> range:
    driver.add(1, GOOD)
    return range(3, 3)


def gap(driver: Driver) -> range:
    driver.add(1, GOOD)
    driver.step({1: range(2)})
    return range(3, 5)


def again(driver: Driver) -> range:
    driver.add(1, GOOD)
    driver.step({1: range(5)})
    return range(5)


CASES: list[tuple[Callable[[Driver], range], str]] = [
    (bad_token, "token id 300 is not in the vocabulary of 300"),
    (negative_token, "token id -2"),
    (bad_temperature, "temperature must be a finite number"),
    (bad_prompt_len, "prompt_len 6"),
    (too_long, "257 tokens are known; the context holds 1 to 256"),
    (no_tokens, "0 tokens are known"),
    (beyond_what_is_known, r"positions \[0, 6\) do not follow: 5 tokens are known"),
    (negative_start, r"positions \[-1, 5\)"),
    (nothing_to_compute, r"positions \[3, 3\)"),
    (gap, r"positions \[3, 5\) do not follow: 5 tokens are known and 2 are computed"),
    (again, r"positions \[0, 5\) do not follow"),
]


@pytest.mark.parametrize(("case", "message"), CASES, ids=[case.__name__ for case, _ in CASES])
def test_a_bad_request_fails_alone_until_its_row_is_given_out_again(
    worker: Worker, case: Callable[[Driver], range], message: str
) -> None:
    driver = Driver(worker)
    driver.add(2, GOOD)
    expected = driver.generate({2: 5}, 3)[2]
    driver.free(2)

    span = case(driver)
    driver.add(0, GOOD)
    outcome = read(driver.step({1: span, 0: range(5)}))
    assert outcome.tokens == {1: [], 0: expected[:1]}
    assert list(outcome.errors) == [1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(outcome.errors[1])
    again = read(driver.step(decodes=[0, 1]))
    assert again.tokens == {0: expected[1:2], 1: []}
    assert again.errors == outcome.errors

    driver.free(1)
    driver.add(1, GOOD, generation=7)
    result = driver.step({1: range(5)}, [0])
    assert result is not None
    assert unpack_int32(result.generations) == [7, 1]
    assert read(result).tokens == {1: expected[:1], 0: expected[2:3]}
    assert read(result).errors == {}


def test_rows_that_nobody_has_are_error_rows(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, GOOD)
    result = driver.step({0: range(5), 9: range(2)}, [-1, 40])
    outcome = read(result)
    assert [len(tokens) for tokens in outcome.tokens.values()] == [1, 0, 0, 0]
    assert set(outcome.errors) == {9, -1, 40}
    assert result is not None
    assert unpack_int32(result.flags) == [0, ROW_ERROR, ROW_ERROR, ROW_ERROR]
    assert unpack_int32(result.generations) == [1, -1, -1, -1]


def test_a_step_of_bad_rows_alone_computes_nothing_and_reports_them(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, [999])
    assert list(read(driver.step({0: range(1)})).errors) == [0]


def test_a_missing_page_or_one_that_does_not_exist_is_an_error_of_its_row(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, GOOD)
    driver.add(1, GOOD)
    driver.add(2, GOOD)
    batch = driver.batch({row: range(5) for row in range(3)})
    pages = PageColumns(pack_int32([0, 1, 2]), pack_int32([1, 2, 2]), pack_int32([0, 1, 512, 3, 4]))
    outcome = read(worker.run_step(msgspec.structs.replace(batch, new_pages=[pages])))
    assert {row: len(tokens) for row, tokens in outcome.tokens.items()} == {0: 0, 1: 0, 2: 1}
    assert "position 4 has no page" in outcome.errors[0]
    assert "page id is not below 512" in outcome.errors[1]


def test_a_row_cannot_decode_beyond_the_context(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, [7] * 256)
    assert len(read(driver.step({0: range(256)})).tokens[0]) == 1
    assert "position 256 is beyond the context of 256 tokens" in read(driver.step(decodes=[0])).errors[0]


def new_req(row: int) -> NewReq:
    """A good request for a row."""
    return NewReq(row, 2, "rid", pack_int32(GOOD), 5, GREEDY, ())


def columns(rows: list[int], counts: list[int], page_ids: list[int]) -> list[PageColumns]:
    """Page columns of one group."""
    return [PageColumns(pack_int32(rows), pack_int32(counts), pack_int32(page_ids))]


@pytest.mark.parametrize(
    "changes",
    [
        {"freed_rows": pack_int32([3])},
        {"freed_rows": pack_int32([0, 0])},
        {"freed_rows": pack_int32([-1])},
        {"freed_rows": b"abc"},
        {"new_reqs": [new_req(0)]},
        {"new_reqs": [new_req(40)]},
        {"new_reqs": [new_req(-1)]},
        {"new_pages": columns([0, 0], [1, 1], [8, 9])},
        {"new_pages": columns([0], [2], [8])},
        {"new_pages": columns([0], [-1], [])},
        {"new_pages": columns([7], [1], [8])},
        {"new_pages": columns([0], [1], [8]) * 2},
        {"decode_rows": pack_int32([0, 0])},
        {"decode_rows": pack_int32([0]), "extend_rows": pack_int32([0])},
        {"extend_rows": pack_int32([0]), "extend_starts": pack_int32([0]), "extend_ends": b""},
        {"decode_width": 2},
    ],
)
def test_a_batch_that_cannot_be_right_raises(worker: Worker, changes: dict[str, object]) -> None:
    driver = Driver(worker)
    driver.add(0, GOOD)
    driver.step({0: range(5)})
    empty: ScheduleBatch = driver.batch()
    with pytest.raises(BatchError):
        worker.run_step(msgspec.structs.replace(empty, **changes))
