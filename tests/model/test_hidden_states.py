"""Every family's hidden states after the final norm are transformers', and do not change what is sampled."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.model.run_decoder import load_decoder, make_batch
from tests.model.tiny_models import VARIANTS, expected_logits, make_model, prompt, save_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_hidden_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    ids, indices = prompt(), torch.tensor([0, 3, 19, len(prompt()) - 1])
    with torch.no_grad():
        states = make_model(variant)(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    batch = dataclasses.replace(make_batch([(ids, 0, len(ids))], only_last=True), hidden_indices_N=indices)
    output = load_decoder(save_model(variant, tmp_path)).forward(batch)
    assert output.hidden_NF is not None
    assert output.logits_SV is not None
    torch.testing.assert_close(output.hidden_NF.float(), states[indices], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.logits_SV, expected_logits(variant)[-1:], atol=TOLERANCE, rtol=0)
