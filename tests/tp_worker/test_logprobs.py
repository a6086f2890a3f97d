"""Log-probabilities of sampled and of prompt tokens are transformers', however the work is cut."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from millstream.common.batch_messages import BatchResult
from millstream.common.logprobs import LogprobReq, TokenLogprobs
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker import logprobs
from millstream.tp_worker.worker import Worker
from tests.model.tiny_models import expected_logits, prompt, save_model
from tests.tp_worker.driver import GREEDY, Driver, load_tiny_worker, read, tiny_args
from tests.tp_worker.ranks import run_ranks

TOLERANCE = 1e-4
IDS = prompt()
LEN = len(IDS)
ALL = LogprobReq(0, 3, (5, 90))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def worker(model_path: Path) -> Worker:
    return load_tiny_worker(tiny_args(model_path, load_format="auto"))


def expected() -> torch.Tensor:
    """[T, V]: what position t says of the token behind it."""
    return expected_logits("llama").double().log_softmax(-1)


def floats(packed: bytes, width: int = 1) -> NDArray[np.float32]:
    return np.frombuffer(packed, np.float32).reshape(-1, width)


def check(found: TokenLogprobs, positions: range, labels: list[int], wanted: LogprobReq) -> None:
    """Compare with transformers' at these positions."""
    rows = expected()[list(positions)]
    assert found.num_tokens == len(positions) == len(labels)
    best = rows.topk(max(wanted.num_top, 1))
    own = rows.gather(1, torch.tensor(labels)[:, None]).numpy()
    np.testing.assert_allclose(floats(found.logprobs), own, atol=TOLERANCE)
    if wanted.num_top:
        np.testing.assert_allclose(floats(found.top_logprobs, wanted.num_top), best.values.numpy(), atol=TOLERANCE)
        ids = np.frombuffer(found.top_ids, np.int32).reshape(-1, wanted.num_top)
        assert (ids == best.indices.numpy()).mean() > 0.95
    if wanted.token_ids:
        asked = rows[:, list(wanted.token_ids)].numpy()
        np.testing.assert_allclose(floats(found.asked_logprobs, len(wanted.token_ids)), asked, atol=TOLERANCE)
    assert bool(found.top_ids) == bool(wanted.num_top)
    assert bool(found.asked_logprobs) == bool(wanted.token_ids)


def result_of(result: BatchResult | None) -> BatchResult:
    assert result is not None
    return result


@pytest.mark.parametrize("slice_rows", [3, 128])
@pytest.mark.parametrize("ends", [(LEN,), (1, LEN), (7, 8, 30, LEN), (LEN - 1, LEN)])
def test_chunks_and_slices_make_no_difference(
    worker: Worker, ends: tuple[int, ...], slice_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS_ROWS", slice_rows)
    driver = Driver(worker)
    driver.add(0, IDS[:20])
    driver.step({0: range(20)})
    driver.add(2, IDS, logprobs=ALL)
    driver.add(1, IDS[:9], logprobs=LogprobReq(4))
    start = 0
    for end in ends:
        extends = {2: range(start, end)} | ({1: range(9)} if start == 0 else {})
        result = result_of(driver.step(extends, [0]))
        last = min(end, LEN - 1)
        if start < last:
            check(result.prompt_logprobs[2], range(start, last), IDS[start + 1 : last + 1], ALL)
        else:
            assert 2 not in result.prompt_logprobs
        if start == 0:
            check(result.prompt_logprobs[1], range(4, 8), IDS[5:9], LogprobReq(4))
        assert 0 not in result.prompt_logprobs
        start = end
    check(result.logprobs[2], range(LEN - 1, LEN), read(result).tokens[2], ALL)
    free_all(driver, 0, 1, 2)


def test_a_cached_beginning_leaves_the_positions_behind_it(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, IDS)
    driver.step({0: range(LEN)})
    wanted = LogprobReq(10, 1)
    driver.add(1, IDS, logprobs=wanted)
    driver._free_pages().extend(driver.pages[0][:2][::-1])  # the same pages, in the same order
    result = result_of(driver.step({1: range(8, LEN)}))
    check(result.prompt_logprobs[1], range(10, LEN - 1), IDS[11:], wanted)
    driver.pages[1] = driver.pages[1][2:]
    free_all(driver, 0, 1)


def test_outputs_have_the_models_own_whatever_the_sampler_does(worker: Worker) -> None:
    params = SamplingParams(temperature=2.0, seed=3, min_new_tokens=9, logit_bias={7: 50.0}, presence_penalty=2.0)
    outputs: dict[int, list[int]] = {0: [], 1: []}
    found: dict[int, list[TokenLogprobs]] = {0: [], 1: []}
    driver = Driver(worker)
    driver.add(0, IDS[:12], GREEDY, logprobs=LogprobReq(-1, 2))
    driver.add(1, IDS[:12], params, logprobs=LogprobReq(-1, 2), end_token_ids=(5, 6, 7))
    result = result_of(driver.step({0: range(12), 1: range(12)}))
    for _ in range(6):
        assert not result.prompt_logprobs
        for row, tokens in read(result).tokens.items():
            outputs[row] += tokens
            found[row].append(result.logprobs[row])
        result = result_of(driver.step(decodes=[0, 1]))
    free_all(driver, 0, 1)
    assert outputs[0] != outputs[1]
    for row in (0, 1):
        check_by_prompt(worker, IDS[:12] + outputs[row], found[row])


def check_by_prompt(worker: Worker, ids: list[int], found: list[TokenLogprobs]) -> None:
    """What was said of each output is what is said of it as a prompt token."""
    driver = Driver(worker)
    driver.add(0, ids, logprobs=LogprobReq(11, 2))
    again = result_of(driver.step({0: range(len(ids))})).prompt_logprobs[0]
    free_all(driver, 0)
    for name in ("logprobs", "top_logprobs"):
        ours = b"".join(getattr(each, name) for each in found)
        np.testing.assert_allclose(floats(ours), floats(getattr(again, name)), atol=TOLERANCE)


def test_a_row_that_fails_has_none(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add(0, IDS[:9], logprobs=ALL)
    driver.add(1, IDS[:9], logprobs=LogprobReq(0, 21))
    result = result_of(driver.step({0: range(9), 1: range(9)}))
    assert list(result.logprobs) == list(result.prompt_logprobs) == [0]
    assert "top_logprobs_num" in result.errors[1]
    free_all(driver, 0, 1)


def scenario(worker: Worker) -> list[list[float]]:
    """What a rank reports of a prefill in two chunks and of two decodes."""
    driver = Driver(worker)
    seen: list[list[float]] = []
    driver.add(0, IDS, logprobs=ALL)
    driver.add(1, IDS[:5], logprobs=LogprobReq(2))
    steps: tuple[tuple[dict[int, range], list[int]], ...] = (
        ({0: range(8), 1: range(5)}, []),
        ({0: range(8, LEN)}, [1]),
        ({}, [0, 1]),
    )
    for extends, decodes in steps:
        result = driver.step(extends, decodes)
        if result is not None:
            for each in (*result.prompt_logprobs.values(), *result.logprobs.values()):
                columns = (each.logprobs, each.top_logprobs, each.asked_logprobs)
                seen += [floats(column).ravel().tolist() for column in columns]
                seen.append(np.frombuffer(each.top_ids, np.int32).tolist())
    free_all(driver, 0, 1)
    return seen


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_ranks_report_what_one_rank_would(
    model_path: Path, worker: Worker, kind: str, size: int, tmp_path: Path
) -> None:
    alone, memory = scenario(worker), os.memfd_create("test")
    args = tiny_args(model_path, load_format="auto", tp_size=size, disable_custom_all_reduce=kind == "gloo")
    try:
        first, *others = run_ranks(size, lambda rank: scenario(load_tiny_worker(args, rank, memory, str(tmp_path))))
    finally:
        os.close(memory)
    assert not any(others)
    assert sum(map(len, alone)) > 100
    for ours, theirs in zip(first, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)


def free_all(driver: Driver, *rows: int) -> None:
    """Nothing is left in the worker."""
    for row in rows:
        driver.pages.setdefault(row, [])
        driver.free(row)
    assert driver.step() is None
