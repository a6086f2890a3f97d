"""Requests for a vector: they end with their prompt, whatever else runs, and a mean is never made of half a prompt."""

from random import Random

import pytest

from millstream.common.batch_messages import BatchResult
from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from millstream.common.logprobs import LogprobReq
from millstream.common.messages import ContinueGenerationReqInput, PauseGenerationReqInput
from tests.scheduler.admission_set_up import random_prompt
from tests.scheduler.fake_worker import embedding_of
from tests.scheduler.harness import Client, Harness


def embed(harness: Harness, rid: str, prompt: list[int], pooling: str = "last", **others: object) -> Client:
    return harness.ask(rid, prompt, 0, pooling=pooling, **others)  # type: ignore[arg-type]


def assert_embedded(client: Client, prompt: list[int]) -> None:
    assert client.embedding == embedding_of(prompt)
    assert client.output_ids == []
    assert [end.finish_reason for end in client.ends] == [FINISH_LENGTH(0)]
    assert client.ends[0].stats.prompt_tokens == len(prompt)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_it_ends_with_its_prompt_beside_others(pooling: str) -> None:
    harness, rng = Harness(chunked_prefill_size=16), Random(1)
    other = harness.ask("other", random_prompt(rng, 9), 12)
    prompts = {f"e{n}": random_prompt(rng, n) for n in (1, 4, 16, 50)}
    clients = {rid: embed(harness, rid, prompt, pooling) for rid, prompt in prompts.items()}
    harness.run()
    for rid, client in clients.items():
        assert_embedded(client, prompts[rid])
    assert len(other.output_ids) == 12


def test_a_mean_takes_nothing_from_the_cache_and_leaves_its_pages_there() -> None:
    harness, prompt = Harness(), random_prompt(Random(2), 22)
    for rid, pooling, cached in (("a", "last", 0), ("b", "mean", 0), ("c", "last", 20), ("d", "mean", 0)):
        client = embed(harness, rid, prompt, pooling)
        harness.run()
        assert_embedded(client, prompt)
        assert client.ends[0].stats.cached_tokens == cached, rid
    harness.ask("e", [*prompt, 1], 1)
    harness.run()
    assert harness.clients["e"].ends[0].stats.cached_tokens == 20


def test_means_of_one_prompt_do_not_wait_for_each_other() -> None:
    harness, prompt = Harness(chunked_prefill_size=8), random_prompt(Random(3), 30)
    clients = [embed(harness, f"e{n}", prompt, "mean") for n in range(3)]
    harness.run()
    for client in clients:
        assert_embedded(client, prompt)


def test_it_may_be_retracted_between_its_chunks_and_aborted() -> None:
    harness, rng = Harness(chunked_prefill_size=4), Random(4)
    prompt = random_prompt(rng, 40)
    client = embed(harness, "e", prompt, "mean")
    gone = embed(harness, "gone", random_prompt(rng, 40), "mean")
    for _ in range(3):
        harness.step()
    harness.control(PauseGenerationReqInput("p", "http", "retract"))
    while harness.results:
        harness.answer()
    harness.plan()
    harness.abort("gone")
    harness.control(ContinueGenerationReqInput("c", "http"))
    harness.run()
    assert_embedded(client, prompt)
    assert client.ends[0].stats.num_retractions == 1
    assert gone.embedding == b""
    assert isinstance(gone.ends[0].finish_reason, FINISH_ABORT)


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling": "max"},
        {"pooling": "last", "grammar": "{}"},
        {"pooling": "last", "logprobs": LogprobReq(start_len=1)},
    ],
    ids=str,
)
def test_what_fits_no_vector_is_refused(fields: dict[str, object]) -> None:
    harness = Harness()
    client = harness.ask("e", [1, 2, 3], 0, **fields)  # type: ignore[arg-type]
    (end,) = client.ends
    assert isinstance(end.finish_reason, FINISH_ABORT)
    assert end.finish_reason.status_code == 400


def test_a_vector_with_outputs_is_refused() -> None:
    client = Harness().ask("e", [1, 2, 3], 5, pooling="last")
    assert isinstance(client.ends[0].finish_reason, FINISH_ABORT)


def test_a_worker_that_gives_no_vector_fails_the_request_alone() -> None:
    harness = Harness()
    client = embed(harness, "e", [1, 2, 3])
    other = harness.ask("other", [4, 5], 3)
    harness.plan()
    harness.results.append(without_embeddings(harness.results.popleft()))
    harness.answer()
    harness.run()
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert reason.status_code == 500
    assert len(other.output_ids) == 3


def without_embeddings(result: BatchResult) -> BatchResult:
    fields = {name: getattr(result, name) for name in result.__struct_fields__}
    return BatchResult(**{**fields, "embeddings": {}})
