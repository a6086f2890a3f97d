"""Cases of sampling, of what changes logits before it, and of log-probabilities."""

import random

import torch

from millstream.kernels.logits import PenaltyTensors, TokenLists
from millstream.kernels.sampling import SamplingTensors
from tests.kernels.operator_cases import Call, Draw, call, cases

NUM_ROWS = (1, 5, 0, 2, 17)
VOCAB_SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 1000, 1024, 1025, 5000)
FLOATS = (torch.float32,)
EXACT = {torch.float32: (0.0, 0.0)}
INF = float("inf")


def random_params(choose: random.Random, num_rows: int) -> SamplingTensors:
    """Every filter on and off, within and beyond what is sensible."""

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([choose.choice(values) for _ in range(num_rows)], dtype=torch.float32)

    return SamplingTensors(
        column(0.0, 0.3, 0.7, 1.0, 2.0, 100.0),
        column(-1, 0, 1, 2, 3, 50, 300, 4000).long(),
        column(1.0, 1.0, 0.0, 1e-6, 0.1, 0.5, 0.9, 0.999),
        column(0.0, 0.0, 0.05, 0.9, 1.0, 1.5),
        torch.tensor([choose.randrange(-(2**63), 2**63) for _ in range(num_rows)], dtype=torch.int64),
    )


def logits_of(draw: Draw) -> torch.Tensor:
    """Rows behind each other or apart; ties, rows with NaN, infinities and nothing that is allowed."""
    num_rows, vocab_size = NUM_ROWS[draw.seed % len(NUM_ROWS)], draw.shapes.choice(VOCAB_SIZES)
    logits = draw.randn(num_rows, vocab_size + draw.shapes.choice((0, 5)))[:, :vocab_size]
    logits *= draw.values.choice((0.0, 0.01, 1.0, 4.0, 30.0))
    if draw.values.random() < 0.3:
        logits.round_(decimals=1)
    for row in range(1, num_rows):
        value = draw.values.choice((None, None, INF, -INF, float("nan")))
        if value is not None:
            logits[row, draw.values.randrange(vocab_size) :: draw.values.choice((1, 7))] = value
    return logits


def token_lists_of(draw: Draw, num_rows: int, vocab_size: int) -> TokenLists:
    """Distinct tokens in each row, none in some, with room behind their ends."""
    room = min(vocab_size, 40)
    starts = torch.arange(num_rows, dtype=torch.int32) * room
    lens = torch.tensor([draw.values.randint(0, room) for _ in range(num_rows)], dtype=torch.int32)
    ids = [draw.values.sample(range(vocab_size), room) for _ in range(num_rows)]
    return TokenLists(starts, starts + lens, torch.tensor(ids, dtype=torch.int32).flatten())


@cases("sample", num_seeds=60, dtypes=FLOATS, tolerances=EXACT)
def sample_case(draw: Draw) -> Call:
    """Positions on both sides of 2^32."""
    logits = logits_of(draw)
    positions = [draw.values.choice((0, 7, 2**32 + 1)) for _ in range(len(logits))]
    return call(logits, random_params(draw.values, len(logits)), torch.tensor(positions, dtype=torch.int64))


@cases("apply_penalties", num_seeds=20, dtypes=FLOATS, tolerances=EXACT)
def penalties_case(draw: Draw) -> Call:
    """Penalties off, rewards, and counts of prompt tokens."""
    logits = logits_of(draw)
    tokens = token_lists_of(draw, *logits.shape)
    counts = [draw.values.choice((0, 1, 2, 1000)) for _ in range(len(tokens.token_ids_N))]

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([draw.values.choice(values) for _ in range(len(logits))], dtype=torch.float32)

    penalties = PenaltyTensors(column(1.0, 1.1, 0.7), column(0.0, 0.3, -2.0), column(0.0, 0.6, -1.1))
    return call(logits, tokens, torch.tensor(counts, dtype=torch.int32), penalties)


@cases("apply_logit_bias", num_seeds=20, dtypes=FLOATS, tolerances=EXACT)
def logit_bias_case(draw: Draw) -> Call:
    """Finite biases and forbidden tokens."""
    logits = logits_of(draw)
    tokens = token_lists_of(draw, *logits.shape)
    biases = draw.randn(len(tokens.token_ids_N)) * 10
    biases[draw.values.randrange(5) :: 3] = -INF
    return call(logits, tokens, biases)


@cases("apply_token_bitmask", num_seeds=30, dtypes=FLOATS, tolerances=EXACT)
def token_bitmask_case(draw: Draw) -> Call:
    """Rows without a mask, rows that share one; all, none and some tokens allowed; any bits behind the last token."""
    logits = logits_of(draw)
    num_words = -(-logits.shape[1] // 32)
    words = [[draw.values.choice((-1, 0, 1, -(2**31), draw.values.getrandbits(31))) for _ in range(num_words)]]
    bitmask = torch.tensor([*words, [-1] * num_words, [0] * num_words], dtype=torch.int32)
    mask_of = [draw.values.choice((-1, 0, 0, 1, 2)) for _ in range(len(logits))]
    return call(logits, bitmask, torch.tensor(mask_of, dtype=torch.int32))


@cases("token_logprobs", num_seeds=40, dtypes=FLOATS, tolerances={torch.float32: (1e-6, 2e-7)})
def token_logprobs_case(draw: Draw) -> Call:
    """No top tokens, few and all; ids that are no token."""
    logits = logits_of(draw)
    num_top = min(draw.shapes.choice((0, 1, 5, 20, 70)), logits.shape[1])
    ids = [draw.values.randint(-1, logits.shape[1]) for _ in range(len(logits))]
    return call(logits, torch.tensor(ids, dtype=torch.int64), num_top)
