"""Writes smollm2_embeddings.json: transformers' hidden states (float32) of prompts, pooled and scaled to the length 1.

python -m tests.e2e.make_embedding_reference
"""

from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tests.e2e.hugging_face import load_packaged_model
from tests.e2e.make_reference import load_reference

REFERENCE_FILE = Path(__file__).parent / "smollm2_embeddings.json"
PROMPT_LENS = (7, 33, 65, 200)


class EmbeddingReference(msgspec.Struct):
    """The vectors are float16, in base64 where this is JSON."""

    prompt_ids: list[int]
    last: bytes
    mean: bytes

    def vector(self, pooling: str) -> NDArray[np.float32]:
        """The vector of "last" or "mean"."""
        return np.frombuffer(getattr(self, pooling), "<f2").astype(np.float32)


def load_embedding_reference() -> list[EmbeddingReference]:
    """The stored references."""
    return msgspec.json.decode(REFERENCE_FILE.read_bytes(), type=list[EmbeddingReference])


def pack(x_F: torch.Tensor) -> bytes:
    """Scaled to the length 1."""
    return torch.nn.functional.normalize(x_F, dim=0).numpy().astype("<f2").tobytes()


@torch.inference_mode()
def main() -> None:
    """Compute and write the references."""
    model, references = load_packaged_model(), []
    for ids in (each.prompt_ids for each in load_reference() if len(each.prompt_ids) in PROMPT_LENS):
        states_TF = model.model(torch.tensor([ids])).last_hidden_state[0]
        references.append(EmbeddingReference(ids, pack(states_TF[-1]), pack(states_TF.mean(0))))
    assert len(references) == len(PROMPT_LENS)
    REFERENCE_FILE.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(each) for each in references) + b"\n]\n")


if __name__ == "__main__":
    main()
