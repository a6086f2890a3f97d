"""Log-probabilities on their way through the scheduler: each token has its own, once, whatever happens to its request."""

from random import Random

import msgspec
import pytest

from millstream.common.batch_messages import BatchResult
from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from millstream.common.logprobs import MAX_LOGPROBS, LogprobReq
from millstream.scheduler.recording.message_json import from_plain, to_plain
from millstream.scheduler.schedule_batch import ProtocolError
from tests.scheduler.fake_worker import logprob_of
from tests.scheduler.harness import VOCAB_SIZE, Client, Harness

PROMPT = list(range(1, 31))


def check(client: Client, prompt: list[int], wanted: LogprobReq | None) -> None:
    """What a request that has ended by its length got."""
    if wanted is None:
        assert client.logprobs == []
        assert client.prompt_logprobs == []
        return
    ids = prompt + client.output_ids
    assert client.logprobs == [logprob_of(ids[at], at) for at in range(len(prompt), len(ids))]
    start = wanted.resolved(len(prompt)).start_len
    expected = [logprob_of(ids[at], at) for at in range(start + 1, len(prompt))]
    assert client.prompt_logprobs == ([expected] if expected else [])


@pytest.mark.parametrize("seed", range(12))
def test_every_token_has_its_own_once(seed: int) -> None:
    """Chunks, shared prefixes, retraction, both depths of the pipeline, drafts of several tokens."""
    draw = Random(seed)
    harness = Harness(
        num_pages=draw.choice([24, 40]),
        page_size=4,
        chunked_prefill_size=draw.choice([-1, 4, 16]),
        disable_overlap_schedule=draw.random() < 0.5,
        schedule_conservativeness=0.0,
        decode_width=draw.choice([1, 1, 3]),
        schedule_policy=draw.choice(["fcfs", "lpm"]),
    )
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(12)]
    asked: dict[str, tuple[list[int], LogprobReq | None]] = {}
    for number in range(14):
        own = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 10))]
        prompt = [*shared[: draw.choice([0, 4, 12])], *own][: harness.state.pool.max_total_num_tokens - 12]
        wanted = draw.choice([None, LogprobReq(-1), LogprobReq(0), LogprobReq(draw.randint(0, len(prompt)))])
        asked[f"r{number}"] = (prompt, wanted)
        harness.ask(f"r{number}", prompt, draw.choice([0, 1, 5, 9]), logprobs=wanted)
        for _ in range(draw.randint(0, 3)):
            harness.step()
    harness.run()
    for rid, (prompt, wanted) in asked.items():
        client = harness.clients[rid]
        assert isinstance(client.ends[0].finish_reason, FINISH_LENGTH)
        check(client, prompt, wanted)


def test_a_prompt_alone_ends_without_an_output_and_stays_cached() -> None:
    harness = Harness()
    client = harness.ask("a", PROMPT, 0, logprobs=LogprobReq(0))
    harness.run()
    assert client.output_ids == client.logprobs == []
    assert client.ends[0].num_tokens == 0
    assert client.ends[0].finish_reason == FINISH_LENGTH(0)
    check(client, PROMPT, LogprobReq(0))
    assert harness.ask("b", PROMPT, 1).ends == []
    harness.run()
    assert harness.clients["b"].cached_tokens == 28


@pytest.mark.parametrize(
    ("start", "cached"), [(-1, 28), (30, 28), (29, 28), (28, 28), (27, 24), (8, 8), (7, 4), (0, 0)]
)
def test_the_cache_serves_what_lies_ahead_of_the_positions(start: int, cached: int) -> None:
    harness = Harness(page_size=4)
    harness.ask("a", PROMPT, 1)
    harness.run()
    client = harness.ask("b", PROMPT, 2, logprobs=LogprobReq(start))
    harness.run()
    assert client.cached_tokens == cached
    check(client, PROMPT, LogprobReq(start))


def test_a_retracted_request_does_not_say_it_twice() -> None:
    harness = Harness(num_pages=12, page_size=4, schedule_conservativeness=0.0)
    prompts = [[i, i, i, i] for i in range(3)]
    for i, prompt in enumerate(prompts):
        harness.ask(f"r{i}", prompt, 20, logprobs=LogprobReq(0))
        harness.step()
    harness.run()
    assert harness.state.stats.num_retractions > 0
    for i, prompt in enumerate(prompts):
        check(harness.clients[f"r{i}"], prompt, LogprobReq(0))
    resumed = [new_req for batch in harness.batches for new_req in batch.new_reqs if len(new_req.input_ids) > 4 * 4]
    assert resumed
    assert all(new_req.logprobs == LogprobReq(3) for new_req in resumed)


@pytest.mark.parametrize(
    "wanted",
    [
        LogprobReq(len(PROMPT) + 1),
        LogprobReq(-2),
        LogprobReq(0, 21),
        LogprobReq(0, -1),
        LogprobReq(0, 0, (VOCAB_SIZE,)),
        LogprobReq(0, 0, (-1,)),
        LogprobReq(0, 0, (1,) * 1025),
    ],
)
def test_what_is_out_of_range_is_refused(wanted: LogprobReq) -> None:
    harness = Harness()
    reason = harness.ask("a", PROMPT, logprobs=wanted).ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert reason.status_code == 400


def test_more_than_memory_should_hold_is_refused() -> None:
    harness = Harness(num_pages=2000, context_len=4000)
    wanted = LogprobReq(0, 20, tuple(range(VOCAB_SIZE)) * 20)
    assert wanted.num_logprobs(len(PROMPT), 3000) > MAX_LOGPROBS
    assert "log-probabilities" in str(harness.ask("a", PROMPT, 3000, logprobs=wanted).ends[0].finish_reason)
    assert harness.ask("b", PROMPT, 3, logprobs=wanted).ends == []


def test_a_recording_keeps_them() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, 2, logprobs=LogprobReq(0))
    harness.plan()
    result = harness.results[0]
    assert result.logprobs
    assert result.prompt_logprobs
    for message in (result, *harness.batches):
        text = msgspec.json.encode(to_plain(message))
        assert from_plain(type(message), msgspec.json.decode(text)) == message
    harness.run()


def test_a_result_without_them_is_a_broken_protocol() -> None:
    harness = Harness()
    harness.ask("a", PROMPT, 2, logprobs=LogprobReq(0))
    harness.plan()
    result: BatchResult = harness.results.popleft()
    result.prompt_logprobs.clear()
    with pytest.raises(ProtocolError, match="log-probabilities"):
        harness.scheduler.process_batch_result(result, 1.0)
