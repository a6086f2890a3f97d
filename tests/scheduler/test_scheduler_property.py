"""The whole scheduler against a fake worker, under random arrivals, aborts, text ends, tiny pools and late answers."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

EOS = (3, 4)


@dataclass(frozen=True)
class Ask:
    """One request; prompts of a family share their beginning."""

    family: int
    shared_len: int
    tail: tuple[int, ...]
    max_new_tokens: int
    ends: tuple[int, ...]
    min_new_tokens: int
    salt: str | None

    @property
    def prompt(self) -> list[int]:
        return [(self.family * 11 + i * i) % VOCAB_SIZE for i in range(self.shared_len)] + list(self.tail)


asks = st.builds(
    Ask,
    family=st.integers(0, 2),
    shared_len=st.one_of(st.integers(1, 12), st.integers(1, 70)),
    tail=st.lists(st.integers(5, 12), max_size=4).map(tuple),
    max_new_tokens=st.one_of(st.integers(1, 6), st.integers(20, 60)),
    ends=st.sampled_from([(), (), EOS]),
    min_new_tokens=st.sampled_from([0, 0, 1]),
    salt=st.sampled_from([None, None, None, "x"]),
)
event = st.one_of(
    asks,
    st.tuples(st.just("plan"), st.just(0)),
    st.tuples(st.just("answer"), st.just(0)),
    st.tuples(st.just("steps"), st.integers(1, 25)),
    st.tuples(st.sampled_from(["abort", "abort_when_short"]), st.integers(0, 30)),
    st.tuples(st.just("text"), st.integers(0, 30)),
    st.tuples(st.just("token_and_text"), st.integers(0, 30)),
)
scripts = st.builds(
    lambda burst, events: burst + events,
    st.lists(asks, min_size=3, max_size=8),
    st.lists(event, min_size=5, max_size=20),
)


@st.composite
def set_ups(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.sampled_from([1, 1, 4, 16, 16, 64]))
    num_slots = draw(st.integers(64, 160))
    return {
        "page_size": page_size,
        "num_pages": max(2, num_slots // page_size),
        "max_running_requests": draw(st.sampled_from([2, 8, 8])),
        "chunked_prefill_size": draw(st.sampled_from([-1, 16, 64, 512])),
        "max_prefill_tokens": draw(st.sampled_from([16, 16384])),
        "schedule_conservativeness": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "context_len": draw(st.sampled_from([90, 1000])),
        "disable_overlap_schedule": draw(st.booleans()),
        "disable_radix_cache": draw(st.sampled_from([False, False, True])),
    }


def expected_outputs(harness: Harness, ask: Ask) -> list[int]:
    """What the request gives alone, with `max_new_tokens` clamped as the context and the pool ask."""
    num_slots, num_tokens = harness.scheduler.state.pool.max_total_num_tokens, len(ask.prompt)
    room = min(harness.scheduler.config.context_len - num_tokens, num_slots - num_tokens + 1)
    min_new_tokens = min(ask.min_new_tokens, ask.max_new_tokens)
    return reference_outputs(ask.prompt, VOCAB_SIZE, min(ask.max_new_tokens, room), ask.ends, min_new_tokens)


def abort_when_pages_are_short(harness: Harness, max_steps: int) -> None:
    """Step until a decode lacks a page while a step is in flight, and abort a request of that step."""
    for _ in range(max_steps):
        while harness.plan():
            pass
        running = list(harness.scheduler.state.running_batch.values())
        if harness.scheduler.state.num_missing_pages() > 0 and harness.results:
            harness.abort(running[-1].rid)
            return
        if harness.results:
            harness.answer()


def play(harness: Harness, script: list[Any]) -> dict[str, Ask]:
    """Apply the events, then run until all have ended."""
    asked: dict[str, Ask] = {}
    for event in script:
        if isinstance(event, Ask):
            rid = f"r{len(asked)}"
            asked[rid] = event
            options = {"eos": event.ends, "min_new_tokens": min(event.min_new_tokens, event.max_new_tokens)}
            harness.ask(rid, event.prompt, event.max_new_tokens, cache_salt=event.salt, **options)
            continue
        kind, number = event
        rid = f"r{number % len(asked)}" if asked else ""
        if kind == "plan":
            harness.plan()
        elif kind == "answer" and harness.results:
            harness.answer()
        elif kind == "steps":
            for _ in range(number):
                harness.step()
        elif kind == "abort" and asked:
            harness.abort(rid)
        elif kind == "abort_when_short":
            abort_when_pages_are_short(harness, 3 * number)
        elif kind == "text" and asked and not harness.clients[rid].text_ends:
            harness.end_text(rid, len(harness.clients[rid].output_ids) // 2)
        elif kind == "token_and_text" and asked and harness.clients[rid].ends:
            harness.end_text(rid, max(0, len(harness.clients[rid].output_ids) - 1))
    harness.run()
    return asked


def check_outcome(harness: Harness, asked: dict[str, Ask]) -> None:
    """Every request ended once, with the tokens that it gives alone; all pages are back."""
    for rid, ask in asked.items():
        client, expected = harness.clients[rid], expected_outputs(harness, ask)
        assert len(client.ends) == 1 or client.text_ends
        assert client.output_ids == expected[: len(client.output_ids)]
        reason = client.ends[0].finish_reason if client.ends else None
        if isinstance(reason, FINISH_LENGTH | FINISH_MATCHED_TOKEN):
            assert client.output_ids == expected
            is_stop = bool(ask.ends) and expected[-1] in ask.ends
            assert isinstance(reason, FINISH_MATCHED_TOKEN if is_stop else FINISH_LENGTH)
        elif isinstance(reason, FINISH_ABORT):
            assert reason.status_code in {400, 499}
    pool = harness.scheduler.state.pool
    assert pool.num_available_pages == pool.allocator.num_pages
    assert len(pool.tree_cache.evict(10**6)) + pool.allocator.num_free_pages == pool.allocator.num_pages


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(set_ups(), scripts)
def test_every_request_ends_once_with_the_tokens_it_gives_alone_and_all_pages_return(
    set_up: dict[str, Any], script: list[Any]
) -> None:
    harness = Harness(**set_up)
    check_outcome(harness, play(harness, script))


def random_ask(rng: random.Random) -> Ask:
    """A request that is long for the pools of a storm."""
    return Ask(
        family=rng.randrange(2),
        shared_len=rng.choice([3, 3, 10, 40]),
        tail=tuple(rng.randrange(5, 12) for _ in range(rng.randrange(4))),
        max_new_tokens=rng.choice([10, 40, 60]),
        ends=rng.choice([(), (), EOS]),
        min_new_tokens=rng.choice([0, 1]),
        salt=None,
    )


def random_script(rng: random.Random) -> list[Any]:
    """Bursts of requests with some of everything between."""
    script: list[Any] = []
    for _ in range(4):
        script += [random_ask(rng) for _ in range(rng.randrange(2, 6))]
        for _ in range(rng.randrange(8, 20)):
            kind = rng.choice(
                ["plan", "answer", "steps", "steps", "abort", "abort_when_short", "text", "token_and_text"]
            )
            script.append((kind, rng.randrange(1, 20)))
    return script


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_storms_in_a_tiny_pool_retract_evict_wait_and_sit_out_and_lose_nothing(page_size: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(
            page_size=page_size,
            num_pages=rng.choice([80, 128]) // page_size,
            max_running_requests=8,
            chunked_prefill_size=rng.choice([-1, 16, 48]),
            schedule_conservativeness=0.0,
            disable_overlap_schedule=seed % 4 == 0,
            disable_radix_cache=seed % 5 == 0,
        )
        check_outcome(harness, play(harness, random_script(rng)))
        seen.update(
            retracted=harness.scheduler.state.stats.num_retractions, hits=harness.scheduler.state.stats.num_hit_tokens
        )
        seen.update(harness.seen)
    assert min(seen[name] for name in ("retracted", "hits", "waits", "sits out", "private", "ending")) >= 2, seen


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(set_ups(), st.lists(asks, min_size=2, max_size=8))
def test_tokens_are_the_same_with_overlap_on_and_off_and_cache_on_and_off(
    set_up: dict[str, Any], script: list[Any]
) -> None:
    outputs = []
    for overlap in (False, True):
        for cache in (False, True):
            options = {"disable_overlap_schedule": overlap, "disable_radix_cache": cache}
            harness = Harness(**{**set_up, **options})
            play(harness, [*script, ("steps", 3), *script])
            outputs.append({rid: client.output_ids for rid, client in harness.clients.items()})
    assert all(each == outputs[0] for each in outputs)
