"""What "the same tokens" means, in one place.

Greedy tokens are compared with a reference's. Where they differ, the served token must be the reference's second
choice with a small top-2 gap; the comparison then goes on from the prompt and the reference's tokens. Few positions
may use this.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

BF16_GAP = 0.3
FP32_GAP = 1e-3
MAX_SHARE = 0.1
CONCURRENCY = 8


class Reference(msgspec.Struct, frozen=True):
    """Greedy tokens of a reference after `prompt_ids`, with its second choices and the gaps between the two logits."""

    prompt_ids: list[int]
    tokens: list[int]
    seconds: list[int]
    gaps: list[float]


def check_same_tokens(
    references: Sequence[Reference], generate: Callable[[list[int], int], list[int]], max_gap: float
) -> int:
    """Compare `generate(prompt_ids, num_tokens)` with every reference, several at a time.

    Returns how many positions used the rule.
    """
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        num_differences = sum(pool.map(lambda reference: _compare(reference, generate, max_gap), references))
    num_positions = sum(len(reference.tokens) for reference in references)
    assert num_differences <= MAX_SHARE * num_positions, f"{num_differences} of {num_positions} positions differ"
    return num_differences


def _compare(reference: Reference, generate: Callable[[list[int], int], list[int]], max_gap: float) -> int:
    num_differences = 0
    done = 0
    while done < len(reference.tokens):
        expected = reference.tokens[done:]
        served = generate(reference.prompt_ids + reference.tokens[:done], len(expected))
        assert len(served) == len(expected)
        same = next((i for i, (ours, theirs) in enumerate(zip(served, expected, strict=True)) if ours != theirs), None)
        if same is None:
            return num_differences
        done += same
        assert served[same] == reference.seconds[done], f"token {done}: not the reference's first or second choice"
        assert reference.gaps[done] < max_gap, f"token {done}: the top-2 gap is {reference.gaps[done]:.3g}"
        num_differences += 1
        done += 1
    return num_differences
