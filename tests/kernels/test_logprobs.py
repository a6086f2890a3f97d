"""Log-probabilities against float64, whichever version runs."""

import pytest
import torch

from millstream.kernels.backend import set_backend
from millstream.kernels.logprobs import token_logprobs

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> None:
    """Both versions mean the same."""
    set_backend(request.param)


def randn(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab_size", [1, 20, 64, 1000, 1025, 49152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 15.0])
def test_they_are_within_1e_5_of_exact_log_softmax(vocab_size: int, spread: float) -> None:
    logits = randn(4, vocab_size) * spread + 3.0
    num_top = min(vocab_size, 20)
    exact = logits.double().log_softmax(-1)
    ids = torch.randint(vocab_size, (4,), generator=torch.Generator().manual_seed(1))
    logprobs, top_ids, top_logprobs = token_logprobs(logits, ids, num_top)
    tolerance = {"atol": 1e-5, "rtol": 2**-24}
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids[:, None])[:, 0], **tolerance)
    torch.testing.assert_close(top_logprobs.double(), exact.gather(1, top_ids), **tolerance)
    torch.testing.assert_close(top_logprobs.double(), exact.topk(num_top).values, **tolerance)


def test_the_probabilities_of_a_whole_vocabulary_sum_to_one() -> None:
    top_logprobs = token_logprobs(randn(2, 300), torch.zeros(2, dtype=torch.int64), 300)[2]
    torch.testing.assert_close(top_logprobs.double().exp().sum(-1), torch.ones(2).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_top", [1, 2, 3, 7, 200])
def test_ties_go_to_the_lowest_id(num_top: int) -> None:
    logits = (randn(6, 200) * 2).round()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0.0
    top_ids = token_logprobs(logits, torch.zeros(6, dtype=torch.int64), num_top)[1]
    for row in range(6):
        falling = sorted(range(200), key=lambda token_id: (-float(logits[row, token_id]), token_id))
        assert top_ids[row].tolist() == falling[:num_top]


def test_no_top_tokens_may_be_asked_for_and_no_more_than_there_are() -> None:
    logprobs, top_ids, top_logprobs = token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]), 0)
    torch.testing.assert_close(logprobs, torch.full((2,), 0.25).log())
    assert top_ids.shape == top_logprobs.shape == (2, 0)
    with pytest.raises(ValueError, match="num_top must be 0 to 4, not 5"):
        token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]), 5)


def test_forbidden_tokens_have_probability_zero_and_come_last() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 1.0]])
    logprobs, top_ids, top_logprobs = token_logprobs(logits, torch.tensor([2]), 4)
    assert logprobs.tolist() == [-INF]
    assert top_ids.tolist() == [[1, 3, 0, 2]]
    torch.testing.assert_close(top_logprobs, torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log())


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_row_without_a_distribution_gives_nan_alone(value: float) -> None:
    logits = randn(3, 100)
    logits[1, 70] = value
    logits[2] = -INF
    logprobs, top_ids, top_logprobs = token_logprobs(logits, torch.tensor([5, 5, 5]), 2)
    assert logprobs.isnan().tolist() == [False, True, True]
    assert top_logprobs.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert top_ids[1:].tolist() == [[-1, -1], [-1, -1]]


def test_an_id_that_is_no_token_gives_nan() -> None:
    logprobs, top_ids, _ = token_logprobs(torch.zeros(3, 7), torch.tensor([-1, 6, 7]), 1)
    assert logprobs.isnan().tolist() == [True, False, True]
    assert top_ids.tolist() == [[0], [0], [0]]


def test_positions_of_a_prompt_may_come_in_chunks() -> None:
    logits, ids = randn(50, 333), torch.arange(50)
    whole = token_logprobs(logits, ids, 3)
    chunks = [token_logprobs(logits[i : i + 7], ids[i : i + 7], 3) for i in range(0, 50, 7)]
    for expected, parts in zip(whole, zip(*chunks, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), expected)


def test_no_rows() -> None:
    logprobs, top_ids, _ = token_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 2)
    assert logprobs.shape == (0,)
    assert top_ids.shape == (0, 2)
