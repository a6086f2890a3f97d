"""Writes smollm2_logprobs.json: log-probabilities of transformers (float64) for prompts of the reference.

python -m tests.e2e.make_logprobs
"""

from pathlib import Path

import msgspec
import torch

from tests.e2e.hugging_face import load_packaged_model
from tests.e2e.make_reference import load_reference

LOGPROBS_FILE = Path(__file__).parent / "smollm2_logprobs.json"
LABELS = (260, 2767, 0)
NUM_TOP = 2
LENS = (16, 31, 48, 64, 100)  # not 33: that prompt makes float32's rounding 20 times as large, transformers' too


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Of one prompt: item t of the lists is what the tokens up to t say of the next one (`own`: of the prompt's)."""

    prompt_ids: list[int]
    own: list[float]
    top: list[list[float]]
    labels: list[list[float]]


def load_logprobs() -> list[PromptLogprobs]:
    """What is saved."""
    return msgspec.json.decode(LOGPROBS_FILE.read_bytes(), type=list[PromptLogprobs])


@torch.inference_mode()
def main() -> None:
    model = load_packaged_model().double()
    found = []
    for reference in load_reference():
        ids = reference.prompt_ids
        if len(ids) not in LENS:
            continue
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        columns = (own, rows.topk(NUM_TOP).values, rows[:, list(LABELS)])
        found.append(PromptLogprobs(ids, *[rounded(column.tolist()) for column in columns]))
    LOGPROBS_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=0) + b"\n")


def rounded(values: list[float] | list[list[float]]) -> list:  # type: ignore[type-arg]
    """To seven digits behind the point."""
    return [rounded(value) if isinstance(value, list) else round(value, 7) for value in values]


if __name__ == "__main__":
    main()
