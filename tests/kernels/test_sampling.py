"""Sampling: the right distribution, the same outcome in every version and every batch."""

import random

import pytest
import torch

from millstream.kernels.backend import set_backend
from millstream.kernels.logits import (
    PenaltyTensors,
    TokenLists,
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
)
from millstream.kernels.sampling import FAILED, SamplingTensors, sample, sample_c
from tests.kernels.sampling_cases import random_params

# chi-square's 99.9 % points by degrees of freedom; all seeds are fixed, so these tests cannot flicker.
CHI_SQUARE_LIMITS = (0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)
LOGITS = [2.0, 1.5, 1.5, 0.0, -0.5, -1.0, -3.0, -20.0]
OCCURRED = {0: 2, 1: 0, 4: 1, 6: 5}  # token -> how often it is in the output; 0: in the prompt alone
REPETITION, FREQUENCY, PRESENCE = 1.3, 0.25, 0.5
BIASES = {0: float("-inf"), 3: 1.25, 5: -0.5, 7: 19.0}
ALLOWED = {0, 2, 3, 5, 7}
Filters = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p
Changes = tuple[str, ...]


def same_params(filters: Filters, seeds: torch.Tensor) -> SamplingTensors:
    temperature, top_k, top_p, min_p = filters
    ones = torch.ones(seeds.shape[0])
    return SamplingTensors(ones * temperature, torch.full_like(seeds, top_k), ones * top_p, ones * min_p, seeds)


def changed_logits(changes: Changes) -> list[float]:
    """The plain definition of each change, on LOGITS."""
    logits = list(LOGITS)
    if "penalties" in changes:
        for token_id, count in OCCURRED.items():
            x = logits[token_id]
            x = x / REPETITION if x > 0 else x * REPETITION
            logits[token_id] = x - FREQUENCY * count - (PRESENCE if count else 0)
    if "bias" in changes:
        logits = [x + BIASES.get(token_id, 0.0) for token_id, x in enumerate(logits)]
    if "mask" in changes:
        logits = [x if token_id in ALLOWED else float("-inf") for token_id, x in enumerate(logits)]
    return logits


def apply_changes(logits_RV: torch.Tensor, changes: Changes) -> None:
    """The same with the operators; all rows share one list."""
    num_rows = logits_RV.shape[0]
    ones = torch.ones(num_rows)

    def shared(token_ids: list[int]) -> TokenLists:
        starts = torch.zeros(num_rows, dtype=torch.int32)
        return TokenLists(starts, starts + len(token_ids), torch.tensor(token_ids, dtype=torch.int32))

    if "penalties" in changes:
        counts = torch.tensor(list(OCCURRED.values()), dtype=torch.int32)
        penalties = PenaltyTensors(ones * REPETITION, ones * FREQUENCY, ones * PRESENCE)
        apply_penalties(logits_RV, shared(list(OCCURRED)), counts, penalties)
    if "bias" in changes:
        apply_logit_bias(logits_RV, shared(list(BIASES)), torch.tensor(list(BIASES.values())))
    if "mask" in changes:
        bitmask = torch.tensor([[sum(1 << token_id for token_id in ALLOWED)]], dtype=torch.int32)
        apply_token_bitmask(logits_RV, bitmask, torch.zeros(num_rows, dtype=torch.int32))


def expected_probabilities(logits: list[float], filters: Filters) -> list[float]:
    """The plain definition of each filter."""
    temperature, top_k, top_p, min_p = filters
    weights = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0).tolist()
    if top_k > 0:
        kth = sorted(weights, reverse=True)[top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    kept, mass = 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        if mass < top_p * sum(weights):
            mass, kept = mass + weight, weight
    weights = [w if w >= kept and w >= min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def chi_square(counts: list[int], probabilities: list[float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells that expect less than 5 are joined."""
    total = sum(counts)
    cells = [(c, p * total) for c, p in zip(counts, probabilities, strict=True) if p * total >= 5]
    rare = [(c, p * total) for c, p in zip(counts, probabilities, strict=True) if 0 < p * total < 5]
    assert sum(c for c, _ in cells) + sum(c for c, _ in rare) == total, "a filtered token was sampled"
    assert sum(c for c, _ in rare) <= 12
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


FILTERS: list[Filters] = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.7, 2.0)
    for top_k in (-1, 2, 5)
    for top_p in (1.0, 0.8, 0.05)
    for min_p in (0.0, 0.1)
] + [(1.0, 1, 1.0, 0.0)]
CHANGES: list[Changes] = [
    (),
    ("penalties",),
    ("bias",),
    ("mask",),
    ("penalties", "bias"),
    ("penalties", "bias", "mask"),
]


@pytest.mark.parametrize("changes", CHANGES, ids="+".join)
def test_samples_follow_the_filtered_distribution_of_the_changed_logits(changes: Changes) -> None:
    num_rows = 3000
    positions = torch.arange(num_rows) % 300
    logits = torch.tensor(LOGITS).repeat(num_rows, 1)
    apply_changes(logits, changes)
    for filters in FILTERS:
        ids = sample(logits, same_params(filters, torch.arange(num_rows) // 300), positions)
        counts = torch.bincount(ids, minlength=len(LOGITS)).tolist()
        statistic, freedom = chi_square(counts, expected_probabilities(changed_logits(changes), filters))
        assert statistic <= CHI_SQUARE_LIMITS[freedom], filters


def test_neighbouring_positions_of_a_seed_are_independent() -> None:
    num_rows = 8001
    logits = torch.tensor([0.3, 0.0]).expand(num_rows, -1)
    params = same_params((1.0, 0, 1.0, 0.0), torch.full((num_rows,), 5))
    ids = sample(logits, params, torch.arange(num_rows))
    first = torch.tensor([0.3, 0.0]).softmax(0).tolist()
    pairs = torch.bincount(ids[:-1] * 2 + ids[1:], minlength=4).tolist()
    statistic, freedom = chi_square(pairs, [p * q for p in first for q in first])
    assert statistic <= CHI_SQUARE_LIMITS[freedom]


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, 5000, 49152])
def test_both_versions_choose_the_same_tokens(vocab_size: int) -> None:
    choose, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    for spread in (0.0, 0.01, 1.0, 4.0, 30.0):
        logits = torch.randn(16, vocab_size, generator=generator) * spread
        if spread == 1.0:
            logits = logits.round(decimals=1)
        logits[1, vocab_size // 2] = float("nan")
        logits[2] = float("-inf")
        logits[3, vocab_size // 3] = float("inf")
        logits[4, : vocab_size // 2] = float("-inf")
        params, positions = random_params(choose, 16), torch.arange(16) + 2**31
        assert torch.equal(sample_c(logits, params, positions), sample.reference(logits, params, positions))


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_both_versions_draw_the_line_at_the_same_token(spread: float) -> None:
    """So many rows that one token more or less would be seen."""
    num_rows = 3000
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, 400, generator=generator) * spread
    uniform = torch.rand(3, num_rows, generator=generator)
    params = SamplingTensors(
        uniform[0] + 0.5,
        torch.randint(-300, 400, (num_rows,), generator=generator),
        1.5 - uniform[1],
        (uniform[2] - 0.7) * 0.3,
        torch.arange(num_rows),
    )
    positions = torch.arange(num_rows)
    assert torch.equal(sample_c(logits, params, positions), sample.reference(logits, params, positions))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_row_gives_the_same_token_alone_and_among_31_others(backend: str) -> None:
    set_backend("torch" if backend == "torch" else "auto")
    logits = torch.randn(32, 3000, generator=torch.Generator().manual_seed(0)) * 2
    params, positions = random_params(random.Random(0), 32), torch.arange(32) * 7
    together = sample(logits, params, positions)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], params.select(order), positions[order]), together[order])
    for row in range(32):
        own = torch.tensor([row])
        assert sample(logits[own], params.select(own), positions[own]) == together[own]


@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_the_number_of_threads_changes_nothing(num_rows: int) -> None:
    for seed in range(10):
        logits = torch.randn(num_rows, 5000, generator=torch.Generator().manual_seed(seed))
        params, positions = random_params(random.Random(seed), num_rows), torch.arange(num_rows)
        torch.set_num_threads(1)
        alone = sample(logits, params, positions)
        for num_threads in (2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(sample(logits, params, positions), alone)


@pytest.mark.parametrize("backend", ["auto", "torch"])
class TestEveryVersion:
    """What holds whichever version runs."""

    @pytest.fixture(autouse=True)
    def chosen_backend(self, backend: str) -> None:
        set_backend("torch" if backend == "torch" else "auto")

    def test_temperature_zero_takes_the_largest_logit_whatever_the_filters(self) -> None:
        logits = torch.randn(5, 333, generator=torch.Generator().manual_seed(3))
        for filters in ((0.0, 0, 1.0, 0.0), (0.0, 5, 0.3, 0.2)):
            ids = sample(logits, same_params(filters, torch.arange(5)), torch.arange(5))
            assert torch.equal(ids, logits.argmax(dim=-1))

    def test_equal_logits_give_the_lowest_id_when_greedy(self) -> None:
        logits = torch.zeros(1, 200)
        logits[0, [70, 190]] = 1.0
        assert sample(logits, same_params((0.0, 0, 1.0, 0.0), torch.arange(1)), torch.arange(1)).tolist() == [70]

    def test_nan_fails_its_own_row_only(self) -> None:
        logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4))
        params = same_params((1.0, 0, 1.0, 0.0), torch.arange(4))
        expected = sample(logits, params, torch.arange(4))
        logits[2, 99] = float("nan")
        expected[2] = FAILED
        assert torch.equal(sample(logits, params, torch.arange(4)), expected)

    def test_forbidden_tokens_are_never_chosen(self) -> None:
        logits = torch.full((2, 6), float("-inf"))
        logits[:, 3] = 0
        params = SamplingTensors(
            torch.tensor([0.0, 50.0]), torch.zeros(2).long(), torch.ones(2), torch.zeros(2), torch.arange(2)
        )
        assert sample(logits, params, torch.arange(2)).tolist() == [3, 3]
        logits[0, 3] = float("-inf")
        assert sample(logits, params, torch.arange(2)).tolist() == [FAILED, 3]

    def test_no_rows_give_no_tokens(self) -> None:
        params = same_params((1.0, 0, 1.0, 0.0), torch.empty(0, dtype=torch.int64))
        assert sample(torch.empty(0, 10), params, torch.empty(0, dtype=torch.int64)).shape == (0,)

    def test_logits_are_left_as_they_are(self) -> None:
        logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
        before = logits.clone()
        sample(logits, same_params((0.7, 5, 0.9, 0.1), torch.arange(3)), torch.arange(3))
        assert torch.equal(logits, before)
