"""Penalties, bias, bad words and minimum lengths: as Hugging Face has them, for every row of a changing batch alone."""

import random
from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from millstream.common.batch_messages import NewReq, ScheduleBatch
from millstream.common.messages import pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.tp_worker.communicator import SingleCommunicator
from millstream.tp_worker.rows import Limits, Rows
from millstream.tp_worker.sampler import next_tokens

VOCAB = 40
END_IDS = (3, 4)
CHI_SQUARE_7 = 24.32  # the 99.9 % point at 7 degrees of freedom; seeds are fixed, so it cannot flicker


class RowsUnderTest:
    """Requests whose logits come from the test, in the rows of a rank."""

    def __init__(self, num_rows: int, vocab_size: int = VOCAB) -> None:
        limits = Limits(max_rows=num_rows, context_len=512, vocab_size=vocab_size, num_pages=1, page_size=16)
        self.rows = Rows(limits)

    def add(self, row: int, prompt: list[int], params: SamplingParams, outputs: list[int] | None = None) -> None:
        """A request, perhaps one that resumes."""
        ids = pack_int32([*prompt, *(outputs or [])])
        self._apply([], [NewReq(row, 0, f"rid-{row}", ids, len(prompt), params, END_IDS)])

    def free(self, row: int) -> None:
        """It ends."""
        self._apply([row], [])

    def _apply(self, freed: list[int], new_reqs: list[NewReq]) -> None:
        self.rows.apply(ScheduleBatch(0, pack_int32(freed), new_reqs, [], b"", b"", b"", b""))
        assert not self.rows.errors

    def sample(self, logits: dict[int, torch.Tensor]) -> dict[int, int]:
        """The next token of these rows, by row."""
        row_ids = torch.tensor(list(logits), dtype=torch.int32).numpy()
        stacked = torch.stack(list(logits.values()))
        ids = next_tokens(self.rows, row_ids, stacked, None, SingleCommunicator(), torch.device("cpu"))
        self.rows.last_tokens[row_ids] = ids
        self.rows.row_lens[row_ids] += 1
        return dict(zip(logits, ids.tolist(), strict=True))


def reference(params: SamplingParams, prompt: list[int], outputs: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Hugging Face's processors, and OpenAI's formula for the two that it lacks."""
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias.items()}))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_new_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_new_tokens, list(END_IDS), "cpu"))
    ids, scores = torch.tensor([prompt + outputs]), logits[None]
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token_id, count in Counter(outputs).items():
        scores[0, token_id] -= params.frequency_penalty * count + params.presence_penalty
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def random_params(draw: random.Random) -> SamplingParams:
    """Greedy, with some of what changes logits."""

    def sometimes(value: float, otherwise: float) -> float:
        return value if draw.random() < 0.5 else otherwise

    words = [tuple(draw.choices(range(6), k=draw.randint(1, 4))) for _ in range(draw.choice((0, 0, 3, 9)))]
    return SamplingParams(
        temperature=0.0,
        seed=0,
        repetition_penalty=sometimes(draw.uniform(0.5, 2), 1.0),
        frequency_penalty=sometimes(draw.uniform(-2, 2), 0.0),
        presence_penalty=sometimes(draw.uniform(-2, 2), 0.0),
        logit_bias={draw.randrange(VOCAB): draw.uniform(-5, 5) for _ in range(draw.choice((0, 3)))},
        bad_words=tuple(dict.fromkeys(words)),
        min_new_tokens=draw.choice((0, 5)),
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_hugging_faces_while_rows_come_and_go_and_resume(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    under_test = RowsUnderTest(8)
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(40):
        for row in range(8):
            if row in live and draw.random() < 0.1:
                under_test.free(row)
                params, prompt, outputs = live.pop(row)
                if draw.random() < 0.5:  # it was retracted
                    under_test.add(row, prompt, params, outputs)
                    live[row] = params, prompt, outputs
            elif row not in live and draw.random() < 0.4:
                params, prompt = random_params(draw), draw.choices(range(12), k=draw.randint(1, 40))
                under_test.add(row, prompt, params)
                live[row] = params, prompt, []
        rows = [row for row in live if draw.random() < 0.8]
        # low ids are likely, so that words, penalties and ends matter
        logits = {row: torch.randn(VOCAB, generator=generator) + torch.linspace(3, -3, VOCAB) for row in rows}
        expected = {row: reference(*live[row], logits[row].clone()).argmax() for row in rows}
        sampled = under_test.sample(logits) if rows else {}
        assert sampled == expected
        for row, token_id in sampled.items():
            live[row][2].append(token_id)


def test_a_prompt_of_many_distinct_tokens_and_many_outputs_stay_exact() -> None:
    under_test = RowsUnderTest(2, vocab_size=400)
    params = SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.5, frequency_penalty=1.0)
    prompt, outputs = list(range(5, 305)), list[int]()
    under_test.add(1, prompt, params)
    generator = torch.Generator().manual_seed(1)
    for _ in range(120):
        logits = 3 * torch.randn(400, generator=generator)
        expected = int(reference(params, prompt, outputs, logits.clone()).argmax())
        assert under_test.sample({1: logits}) == {1: expected}
        outputs.append(expected)


def test_the_whole_chain_draws_from_the_distribution_that_it_describes() -> None:
    params = SamplingParams(
        temperature=0.8,
        top_k=6,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        logit_bias={1: 0.7, 5: -0.5},
        bad_words=((7,), (2, 6)),
        min_new_tokens=9,
    )
    logits = torch.tensor([2.0, 1.5, 1.5, 4.0, -0.5, -1.0, 3.0, 2.0])
    prompt, outputs, num_draws = [0, 4, 7], [0, 1, 2], 4096
    probabilities = plain_filters(reference(params, prompt, outputs, logits.clone()), params)
    assert sum(p > 0 for p in probabilities) >= 3
    under_test = RowsUnderTest(num_draws, vocab_size=8)
    for row in range(num_draws):
        seeded = {field: getattr(params, field) for field in params.__struct_fields__} | {"seed": row}
        under_test.add(row, prompt, SamplingParams(**seeded), outputs)
    counts = Counter(under_test.sample(dict.fromkeys(range(num_draws), logits)).values())
    assert {token_id for token_id in counts if probabilities[token_id] == 0} == set()
    expected = [(counts[token_id], num_draws * p) for token_id, p in enumerate(probabilities) if p > 0]
    assert sum((count - mean) ** 2 / mean for count, mean in expected) < CHI_SQUARE_7


def plain_filters(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p of what is left, min-p: probabilities by their definitions."""
    z = [float(x) / params.temperature for x in logits]
    likeliest_first = sorted(range(len(z)), key=lambda token_id: -z[token_id])[: params.top_k]
    weights = {token_id: torch.tensor(z[token_id]).exp().item() for token_id in likeliest_first}
    kept, mass, total = list[int](), 0.0, sum(weights.values())
    for token_id in likeliest_first:
        if mass < params.top_p * total:
            kept.append(token_id)
            mass += weights[token_id]
    kept = [token_id for token_id in kept if weights[token_id] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token_id] for token_id in kept)
    return [weights[token_id] / total if token_id in kept else 0.0 for token_id in range(len(z))]
