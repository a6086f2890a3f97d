"""What must be true when a storm is over: every request ended once and rightly, and nothing is lost."""

from collections import Counter
from itertools import takewhile

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN
from millstream.scheduler.invariants import broken_invariants
from millstream.scheduler.output import OUT_OF_MEMORY
from tests.scheduler.fake_worker import embedding_of, logprob_of, reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Client
from tests.scheduler.storm import Storm
from tests.scheduler.storm_set_up import Ask

STEPS_OF_A_REQUEST = 500  # alone in the pool: more than it needs


def finish(storm: Storm, *, is_aborted: bool = False) -> None:
    """Abort everything, or let it run to its end; then `check_end`."""
    if storm.state.is_paused:
        storm.go_on()
    if is_aborted:
        storm.abort(list(storm.asked))
    max_steps = STEPS_OF_A_REQUEST * (1 + len(storm.state.requests))
    while storm.state.requests or storm.harness.results:
        storm.steps(1)
        max_steps -= 1
        assert max_steps, f"requests are stuck: {list(storm.state.requests)}"
    check_end(storm)


def check_end(storm: Storm) -> None:
    """Check every request, and that nothing is lost; AssertionError for the first thing that is wrong."""
    problems = broken_invariants(storm.state)
    assert not problems, problems
    for rid in storm.asked:
        _check_request(storm, rid)
    _check_all_is_back(storm)
    _check_controls(storm)
    storm.look()


def _check_request(storm: Storm, rid: str) -> None:
    """It ended once, for a reason that it had, with the tokens that it gives alone; and its story says so."""
    client, expected = storm.harness.clients[rid], _expected_outputs(storm, storm.asked[rid])
    outputs = client.output_ids
    assert len(client.starts) == 1, f"{rid} has {len(client.starts)} starts"
    assert len(client.ends) + bool(client.text_ends) >= 1, f"{rid} has no end"
    assert len(client.ends) <= 1, f"{rid} ended {len(client.ends)} times"
    assert outputs == expected[: len(outputs)], f"{rid} gave {outputs}, not {expected}"
    assert len(outputs) >= storm.text_ends.get(rid, 0)
    _check_logprobs(storm.asked[rid], client)
    if client.ends:
        _check_reason(storm, rid, client, expected)
    _check_story(storm, rid)


def _check_logprobs(ask: Ask, client: Client) -> None:
    """Every output has its own; the prompt's are all there as soon as there is an output."""
    if ask.logprob_start is None:
        assert not client.logprobs
        assert not client.prompt_logprobs
        return
    ids, prompt_len = ask.prompt + client.output_ids, len(ask.prompt)
    assert client.logprobs == [logprob_of(ids[at], at) for at in range(prompt_len, len(ids))]
    start = ask.logprob_start if ask.logprob_start >= 0 else prompt_len
    expected = [logprob_of(ids[at], at) for at in range(start + 1, prompt_len)]
    assert client.prompt_logprobs == ([expected] if expected and client.output_ids else [])


def _check_reason(storm: Storm, rid: str, client: Client, expected: list[int]) -> None:
    end, ask = client.ends[0], storm.asked[rid]
    reason, stats = end.finish_reason, end.stats
    assert end.num_tokens == len(client.output_ids)
    assert not client.output_ids or stats.num_retractions >= client.generation
    assert 0 <= stats.cached_tokens <= _longest_shared_prefix(storm, rid), f"{rid} has hits that nobody could cache"
    assert ask.pooling != "mean" or stats.cached_tokens == 0, f"{rid} has no state of what was cached"
    has_ended = not isinstance(reason, FINISH_ABORT)
    assert client.embedding == (embedding_of(ask.prompt) if ask.pooling and has_ended else b"")
    if ask.pooling and has_ended:
        assert reason == FINISH_LENGTH(0)
        return
    if not isinstance(reason, FINISH_ABORT):
        assert client.output_ids == expected, f"{rid} ended after {len(client.output_ids)} of {len(expected)} tokens"
        is_stop = expected[-1] in ask.ends
        assert reason == (FINISH_MATCHED_TOKEN(expected[-1]) if is_stop else FINISH_LENGTH(len(expected)))
        return
    assert reason.err_type != OUT_OF_MEMORY, "a request that was admitted fits when it is alone"
    config, status = storm.harness.scheduler.config, reason.status_code
    assert (status in {400, 429}) == (storm.refusals.get(rid) == status), f"{rid} is refused with {status}"
    assert (status == 499) == (rid in storm.aborted)
    if status == 500:
        # A step may go past the end before it fails as a whole.
        beyond = reference_outputs([*ask.prompt, *expected], VOCAB_SIZE, config.decode_width - 1)
        failing = storm.set_up["failing_token_id"]
        assert failing in (ask.prompt[-1], *expected, *beyond), f"{rid} failed, and nothing was wrong with it"
    if status == 503:
        assert ask.waiting_timeout or config.request_waiting_timeout
        assert not client.output_ids
    if status == 504:
        assert ask.timeout or config.request_timeout


def _longest_shared_prefix(storm: Storm, rid: str) -> int:
    """The most tokens that another request of the same namespace may have cached for this one."""
    ask = storm.asked[rid]
    longest = 0
    for other_rid, other in storm.asked.items():
        if other_rid != rid and other.cache_salt == ask.cache_salt:
            cached = [*other.prompt, *storm.harness.clients[other_rid].output_ids]
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(ask.prompt, cached, strict=False))
            longest = max(longest, sum(1 for _ in equal))
    return min(longest, len(ask.prompt) - 1)


def _expected_outputs(storm: Storm, ask: Ask) -> list[int]:
    """What the request gives alone, with `max_new_tokens` clamped as the context and the pool ask."""
    if ask.pooling:
        return []
    config, prompt_len = storm.harness.scheduler.config, len(ask.prompt)
    num_slots = config.num_kv_tokens - config.max_steps_in_flight * (config.decode_width - 1)
    room = min(config.context_len - prompt_len, num_slots - prompt_len + 1)
    wanted = room if ask.max_new_tokens is None else min(ask.max_new_tokens, room)
    return reference_outputs(ask.prompt, VOCAB_SIZE, wanted, ask.ends, ask.min_new_tokens)


def _check_story(storm: Storm, rid: str) -> None:
    """`explain` tells one arrival, and one end after everything else."""
    status, events = storm.state.journal.explain(rid)
    told = Counter(event.what for event in events)
    assert status == "ended"
    assert told["refused"] + told["ended"] == 1, told
    assert told["refused"] == (rid in storm.refusals)
    assert told["queued"] == told["ended"]
    last = next(event for event in reversed(events) if event.what != "text_ended")
    assert last.what in {"refused", "ended"}
    if rid in storm.text_ends:
        assert (last.numbers["reason"], last.numbers["tokens"]) == ("text", storm.text_ends[rid])
    num_retractions = told["retracted"] + told["preempted"]
    if "omitted" not in told and last.what == "ended":
        assert num_retractions == last.numbers["retractions"]
        assert num_retractions <= told["admitted"] <= 1 + num_retractions


def _check_all_is_back(storm: Storm) -> None:
    """No page, row or queue entry is held; a flush empties the tree."""
    state, worker = storm.state, storm.harness.worker
    pool, config = state.pool, storm.harness.scheduler.config
    assert pool.num_available_pages == config.num_pages
    assert pool.tree_cache.protected_pages == 0
    assert sorted(state.free_rows) == list(range(config.max_running_requests))
    assert sorted(worker.rows) == sorted(state.freed_rows), "the workers hold other rows than are told to be freed"
    held = (state.running_batch, state.ending, state.prefilling, state.in_flight, list(state.waiting_queue))
    assert not any(held)
    assert state.chunked_req is None
    assert len(state.waiting_queue) == state.waiting_queue.num_tokens == 0
    assert storm.harness.scheduler.next_deadline() is None
    storm.flush()
    assert pool.allocator.num_free_pages == config.num_pages


def _check_controls(storm: Storm) -> None:
    """Every control request is answered once."""
    assert sorted(reply.request_id for reply in storm.harness.replies) == sorted(storm.controls)
