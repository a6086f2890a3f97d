"""Every family gives transformers' logits: one prefill, the same in chunks, and token by token."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.model.run_decoder import load_decoder, make_batch, run
from tests.model.tiny_models import VARIANTS, expected_logits, prompt, save_model

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(VARIANTS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A variant's name and its directory."""
    return request.param, save_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("piece_len", [None, 13, 1], ids=["one-prefill", "chunks", "token-by-token"])
def test_logits_are_those_of_transformers(saved: tuple[str, Path], piece_len: int | None) -> None:
    variant, folder = saved
    logits = run(load_decoder(folder), prompt(), piece_len)
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits(variant), atol=TOLERANCE, rtol=0)


def test_requests_in_one_batch_do_not_see_each_other(saved: tuple[str, Path]) -> None:
    variant, folder = saved
    decoder = load_decoder(folder)
    ids = prompt()
    decoder.forward(make_batch([(ids, 0, 20), (ids, 0, 1), (ids, 0, 30)]))
    logits = decoder.forward(make_batch([(ids, 20, 41), (ids, 1, 2), (ids, 30, 31)], only_last=True)).logits_SV
    assert logits is not None
    torch.testing.assert_close(logits, expected_logits(variant)[[40, 1, 30]], atol=TOLERANCE, rtol=0)


def test_a_step_that_samples_nothing_returns_no_logits(tmp_path: Path) -> None:
    decoder = load_decoder(save_model("llama", tmp_path))
    batch = dataclasses.replace(make_batch([(prompt(), 0, 5)]), logits_indices_S=torch.empty(0, dtype=torch.int64))
    logits = decoder.forward(batch).logits_SV
    assert logits is not None
    assert logits.shape == (0, 97)


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_float32(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    logits = run(load_decoder(save_model(variant, tmp_path), dtype=dtype), prompt(), 13)
    assert logits is not None
    assert logits.dtype == torch.float32
    expected = expected_logits(variant)
    error = (logits - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
