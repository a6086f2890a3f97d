"""Writes smollm2_reference.json: greedy tokens of transformers (float32) for prompts from 5 to 3,000 tokens.

python -m tests.e2e.make_reference
"""

import random
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from millstream.common.model_path import find_model
from tests.e2e.hugging_face import greedy, load_packaged_model
from tests.e2e.teacher_forced import Reference

REFERENCE_FILE = Path(__file__).parent / "smollm2_reference.json"
PROMPT_LENS = (
    5,
    7,
    11,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    64,
    65,
    100,
    128,
    200,
    256,
    300,
    400,
    511,
    640,
    900,
    1300,
    2000,
    3000,
)
NUM_TOKENS = 24
MIN_THIRD_GAP = 0.2
OPENINGS = (
    "Once upon a time, in a village by the sea, ",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, three astronauts ",
    "<|im_start|>user\nWhat is the largest planet?<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist ",
)
SENTENCES = (
    "The miller opened the gate and the water began to turn the wheel.",
    "Every morning she counted the sacks of grain that stood by the door.",
    "A long road led from the river to the market in the next town.",
    "He wrote down 17 numbers, added them, and found that the sum was 2,048.",
    "Nobody knew why the old clock had stopped at half past nine.",
    "Water, wind and patience: these were the three things that the mill needed.",
    "The children asked whether fish sleep, and their teacher did not know.",
    "It rained for three days; on the fourth, the bridge was gone.",
)


def load_reference() -> list[Reference]:
    """The stored references."""
    return msgspec.json.decode(REFERENCE_FILE.read_bytes(), type=list[Reference])


def make_prompt(tokenizer: Any, index: int, length: int, seed: int) -> list[int]:
    """Token ids of a prompt: an opening, cut or filled up with sentences to its length."""
    rng = random.Random(1000 * seed + index)
    text = " ".join(rng.choice(SENTENCES) for _ in range(length // 8 + 4))
    opening = tokenizer(OPENINGS[(index + seed) % len(OPENINGS)])["input_ids"]
    filler = tokenizer(text)["input_ids"]
    return (filler[: max(0, length - len(opening))] + opening)[-length:]


def main() -> None:
    """Compute and write the references.

    A prompt after which three tokens are nearly tied decides nothing under the rule of teacher_forced.py: another
    one of its length takes its place.
    """
    path = find_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = load_packaged_model()
    references = []
    for index, length in enumerate(PROMPT_LENS):
        for seed in range(20):
            reference, third_gap = greedy(model, make_prompt(tokenizer, index, length, seed), NUM_TOKENS)
            if third_gap >= MIN_THIRD_GAP:
                references.append(reference)
                break
    assert len(references) == len(PROMPT_LENS)
    rounded = [msgspec.structs.replace(each, gaps=[round(gap, 4) for gap in each.gaps]) for each in references]
    REFERENCE_FILE.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(each) for each in rounded) + b"\n]\n")


if __name__ == "__main__":
    main()
