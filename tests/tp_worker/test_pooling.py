"""Vectors of prompts: the same whole and in chunks, alone and beside others, and only where all states are there."""

import numpy as np
import pytest
from numpy.typing import NDArray

from millstream.common.batch_messages import BatchResult
from millstream.common.logprobs import LogprobReq
from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import Driver, read

PROMPT = [5, 9, 200, 31, 7, 7, 120, 64, 3, 250, 11, 12, 13]
LEN = len(PROMPT)


def vectors(result: BatchResult | None) -> dict[int, NDArray[np.float32]]:
    assert result is not None
    return {row: np.frombuffer(packed, np.float32) for row, packed in result.embeddings.items()}


def embed(worker: Worker, pooling: str, *ends: int) -> NDArray[np.float32]:
    """The vector of PROMPT, computed in chunks that end there, while another row decodes."""
    driver = Driver(worker)
    driver.add(1, [8, 9, 10])
    driver.step({1: range(3)})
    driver.add(0, PROMPT, pooling=pooling)
    start, result = 0, None
    for end in ends:
        assert result is None or not result.embeddings
        result, start = driver.step({0: range(start, end)}, [1]), end
    assert list(vectors(result)) == [0]
    found = vectors(result)[0]
    driver.free(0)
    driver.free(1)
    driver.step()
    driver.add(0, PROMPT)
    assert vectors(driver.step({0: range(LEN)})) == {}  # the row's next request wants none
    driver.free(0)
    driver.step()
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_make_no_difference(worker: Worker, pooling: str) -> None:
    whole = embed(worker, pooling, LEN)
    assert len(whole) == 48
    assert np.linalg.norm(whole) == pytest.approx(1)
    for ends in ((1, LEN), (4, 8, LEN), (LEN - 1, LEN)):
        np.testing.assert_allclose(embed(worker, pooling, *ends), whole, atol=1e-5)


def test_mean_is_the_mean_of_what_last_says_of_every_beginning(worker: Worker) -> None:
    """The vectors have the length 1, so this compares directions: the states of a norm with unit weights are as long."""
    driver = Driver(worker)
    for row in range(LEN):
        driver.add(row, PROMPT[: row + 1], pooling="last")
    driver.add(LEN, PROMPT, pooling="mean")
    spans = {row: range(row + 1) for row in range(LEN)}
    found = vectors(driver.step({**spans, LEN: range(LEN)}))
    mean = np.mean([found[row] for row in range(LEN)], axis=0)
    np.testing.assert_allclose(found[LEN], mean / np.linalg.norm(mean), atol=2e-3)


def test_last_takes_the_pages_of_a_prefix_and_mean_gives_nothing_then(worker: Worker) -> None:
    whole = embed(worker, "last", LEN)
    driver = Driver(worker)
    driver.add(0, PROMPT)
    driver.step({0: range(LEN)})
    assert driver.free_pages is not None
    driver.free_pages += driver.pages[0][1::-1]  # the pages that row 1 gets first
    driver.add(1, PROMPT, pooling="last")
    driver.add(2, PROMPT, pooling="mean")
    result = driver.step({1: range(8, LEN), 2: range(8, LEN)})
    assert driver.pages[1][:2] == driver.pages[0][:2]
    assert read(result).errors == {}
    assert set(vectors(result)) == {1}
    np.testing.assert_allclose(vectors(result)[1], whole, atol=1e-5)


def test_log_probabilities_in_the_same_step_change_nothing(worker: Worker) -> None:
    whole = embed(worker, "mean", LEN)
    driver = Driver(worker)
    driver.add(0, PROMPT, logprobs=LogprobReq(start_len=0))
    driver.add(1, PROMPT, pooling="mean")
    driver.add(2, PROMPT, logprobs=LogprobReq(start_len=4))
    result = driver.step({row: range(LEN) for row in range(3)})
    np.testing.assert_allclose(vectors(result)[1], whole, atol=1e-5)
    assert result is not None
    assert {row: found.num_tokens for row, found in result.prompt_logprobs.items()} == {0: LEN - 1, 2: LEN - 5}


def test_a_pooling_that_is_none_is_the_error_of_its_row_alone(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, PROMPT, pooling="max")
    driver.add(1, PROMPT, pooling="last")
    result = driver.step({0: range(LEN), 1: range(LEN)})
    assert "pooling must be one of last, mean" in read(result).errors[0]
    assert set(vectors(result)) == {1}
