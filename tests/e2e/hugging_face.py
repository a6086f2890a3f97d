"""Hugging Face's transformers as the oracle for the packaged model."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import GgufConfig

from millstream.common.model_path import find_model
from tests.e2e.teacher_forced import Reference


def load_packaged_model() -> Any:
    """SmolLM2 in float32, dequantised by transformers."""
    path = find_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> tuple[Reference, float]:
    """Greedy decoding, keeping the two best logits of every step; and the smallest gap of a third one to the best."""
    reference, third_gap = Reference(prompt_ids, [], [], []), float("inf")
    output = model(torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
    for _ in range(num_tokens):
        values, ids = output.logits[0, -1].topk(3)
        reference.tokens.append(int(ids[0]))
        reference.seconds.append(int(ids[1]))
        reference.gaps.append(float(values[0] - values[1]))
        third_gap = min(third_gap, float(values[0] - values[2]))
        cache = output.past_key_values
        output = model(ids[:1].reshape(1, 1), cache=cache, use_cache=True, logits_to_keep=1)
    return reference, third_gap
