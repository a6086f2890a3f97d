"""What is done with 32 rows of logits over SmolLM2's vocabulary."""

from collections.abc import Iterator

import torch

from millstream.kernels.logits import PenaltyTensors, TokenLists
from millstream.kernels.sampling import SamplingTensors
from tests.bench.kernel_cases import VOCAB, Call, Case, bench

NUM_ROWS, NUM_LISTED = 32, 400
FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (0.7, 0, 0.9, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def make_logits() -> torch.Tensor:
    return torch.randn(NUM_ROWS, VOCAB) * 3


def token_lists() -> TokenLists:
    """Distinct tokens of each row."""
    starts = torch.arange(NUM_ROWS, dtype=torch.int32) * NUM_LISTED
    ids = torch.cat([torch.randperm(VOCAB)[:NUM_LISTED] for _ in range(NUM_ROWS)]).to(torch.int32)
    return TokenLists(starts, starts + NUM_LISTED, ids)


@bench("sample")
def sample_cases(dtype: torch.dtype) -> Iterator[Case]:
    logits, positions = make_logits(), torch.arange(NUM_ROWS)
    for name, (temperature, top_k, top_p, min_p) in FILTERS.items():
        floats = (torch.full((NUM_ROWS,), value) for value in (temperature, top_p, min_p))
        temperature_R, top_p_R, min_p_R = floats
        params = SamplingTensors(
            temperature_R, torch.full((NUM_ROWS,), top_k), top_p_R, min_p_R, torch.arange(NUM_ROWS)
        )
        yield Case(f"{name}, {NUM_ROWS} rows", [Call(logits, params, positions)], num_bytes=logits.nbytes)


@bench("apply_penalties")
def penalty_cases(dtype: torch.dtype) -> Iterator[Case]:
    penalties = PenaltyTensors(*(torch.full((NUM_ROWS,), value) for value in (1.1, 0.1, 0.1)))
    counts = torch.ones(NUM_ROWS * NUM_LISTED, dtype=torch.int32)
    call = Call(make_logits(), token_lists(), counts, penalties)
    yield Case(f"{NUM_LISTED} tokens, {NUM_ROWS} rows", [call], num_bytes=16 * NUM_ROWS * NUM_LISTED)


@bench("apply_logit_bias")
def bias_cases(dtype: torch.dtype) -> Iterator[Case]:
    call = Call(make_logits(), token_lists(), torch.zeros(NUM_ROWS * NUM_LISTED))
    yield Case(f"{NUM_LISTED} tokens, {NUM_ROWS} rows", [call], num_bytes=16 * NUM_ROWS * NUM_LISTED)


@bench("apply_token_bitmask")
def bitmask_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, bits in (("all allowed", -1), ("half allowed", 0x55555555)):
        logits, mask = make_logits(), torch.full((NUM_ROWS, VOCAB // 32), bits, dtype=torch.int32)
        call = Call(logits, mask, torch.arange(NUM_ROWS, dtype=torch.int32))
        share = 0.5 if bits != -1 else 0.0
        yield Case(f"{name}, {NUM_ROWS} rows", [call], num_bytes=mask.nbytes + share * logits.nbytes)


@bench("token_logprobs")
def logprobs_cases(dtype: torch.dtype) -> Iterator[Case]:
    logits, ids = make_logits(), torch.randint(0, VOCAB, (NUM_ROWS,))
    for num_top in (0, 5):
        yield Case(f"top {num_top}, {NUM_ROWS} rows", [Call(logits, ids, num_top)], num_bytes=logits.nbytes)
