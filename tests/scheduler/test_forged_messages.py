"""Requests that no edge would send: each ends in one answer or works, none harms the scheduler or its neighbours."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.common.finish_reason import FINISH_ABORT
from millstream.common.logprobs import LogprobReq
from millstream.common.messages import ExplainReqInput, TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.scheduler.admission import MAX_LENS
from millstream.scheduler.fan_out import children_of
from tests.scheduler.harness import VOCAB_SIZE, Harness

GOOD = TokenizedGenerateReqInput(
    rid="r",
    frontend="http",
    arrival=0.0,
    input_ids=pack_int32([1, 2, 3]),
    sampling_params=SamplingParams(max_new_tokens=2, seed=7),
)
INTS = [-(2**63), -1, 0, 1, 2, 16, 17, 49, 50, 2**31, 2**63 - 1, 2**64 - 1]
FLOATS = [-1.0, 0.0, 0.5, 1.0, 2.0, 1e39, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "a", "\0", "(", "x" * 2000]
STOPS = [(text,) * number for text in TEXTS for number in (1, 40)]
IDS = [(), *((each,) for each in INTS), (1,) * 2000]
PARAMS: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "seed", "n"), INTS),
    **dict.fromkeys(("temperature", "top_p", "min_p"), FLOATS),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), FLOATS),
    **dict.fromkeys(("stop", "stop_regex"), STOPS),
    "stop_token_ids": IDS,
    "logit_bias": [*({each: 1.0} for each in INTS), *({1: each} for each in FLOATS)],
    "bad_words": [*((each,) for each in IDS), ((1,),) * 2000],
}
MESSAGE: dict[str, Sequence[Any]] = {
    "input_ids": [b"", b"abc", pack_int32([-1]), pack_int32([VOCAB_SIZE]), pack_int32([3] * 2000)],
    "eos_token_ids": IDS,
    **dict.fromkeys(("arrival", "timeout", "waiting_timeout"), FLOATS),
    "priority": INTS,
    **dict.fromkeys(("cache_salt", "routing_key", "lora_id", "traceparent", "grammar", "pooling"), TEXTS),
    "logprobs": [*(LogprobReq(each, 2) for each in INTS), *(LogprobReq(0, each) for each in INTS),
                 *(LogprobReq(0, 0, each) for each in IDS)],
}  # fmt: skip


def some_of(fields: dict[str, Sequence[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three of the fields, each with a value."""
    names = st.lists(st.sampled_from(list(fields)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.sampled_from(fields[name]) for name in chosen}))


def check_lone_field(name: str, values: Sequence[Any], *, in_params: bool) -> None:
    for value, n in product(values, (1, 2)):
        params = {"n": n, **({name: value} if in_params else {})}
        check_forged(params, {} if in_params else {name: value})


@pytest.mark.parametrize("name", PARAMS)
def test_no_value_of_a_sampling_parameter_raises(name: str) -> None:
    check_lone_field(name, PARAMS[name], in_params=True)


@pytest.mark.parametrize("name", MESSAGE)
def test_no_value_of_a_field_raises(name: str) -> None:
    check_lone_field(name, MESSAGE[name], in_params=False)


@settings(max_examples=100, deadline=None)
@given(some_of(PARAMS), some_of(MESSAGE))
def test_no_mix_of_fields_raises(params: dict[str, Any], fields: dict[str, Any]) -> None:
    check_forged(params, fields)


def check_forged(params: dict[str, Any], fields: dict[str, Any]) -> None:
    """It never raises, what is admitted has finite numbers, and a neighbour is served."""
    forged = msgspec.structs.replace(
        GOOD, sampling_params=msgspec.structs.replace(GOOD.sampling_params, **params), **fields
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(forged), type=TokenizedGenerateReqInput)
    harness = Harness(context_len=60)
    neighbour = harness.ask("good", [4, 5], 3)
    harness.send(sent)
    for req in harness.state.requests.values():
        assert all(map(math.isfinite, numbers(msgspec.to_builtins(req.message))))
    harness.run()
    assert len(neighbour.output_ids) == 3
    for child in children_of(sent):
        assert len(harness.clients[child.rid].ends) == 1
        harness.control(ExplainReqInput("asked", "http", child.rid))
    msgspec.msgpack.encode(harness.replies)


def numbers(value: Any) -> Iterator[float]:
    """All in it."""
    match value:
        case int() | float():
            yield value
        case dict():
            yield from chain(numbers(list(value)), numbers(list(value.values())))
        case list() | tuple():
            yield from chain.from_iterable(map(numbers, value))


def refusal_of(**fields: Any) -> str:
    harness = Harness()
    client = harness.send(msgspec.structs.replace(GOOD, **fields))
    (end,) = client.ends
    assert isinstance(end.finish_reason, FINISH_ABORT)
    assert end.finish_reason.status_code == 400
    return end.finish_reason.message


@pytest.mark.parametrize("name", MAX_LENS)
def test_a_text_that_is_too_long_is_refused_by_its_name(name: str) -> None:
    assert refusal_of(**{name: "x" * (MAX_LENS[name] + 1)}).startswith(name)


@pytest.mark.parametrize("token_ids", [(VOCAB_SIZE,), (-1,), (1,) * 1025])
def test_end_tokens_beyond_the_vocabulary_or_without_end_are_refused(token_ids: tuple[int, ...]) -> None:
    assert refusal_of(eos_token_ids=token_ids).startswith("eos_token_ids")


@pytest.mark.parametrize("n", [2, 16])
def test_a_vector_is_wanted_once(n: int) -> None:
    params = SamplingParams(max_new_tokens=0, n=n, seed=7)
    assert refusal_of(pooling="last", sampling_params=params).endswith("n is 1.")


@pytest.mark.parametrize("params", [SamplingParams(top_k=2**31), SamplingParams(min_new_tokens=2**31)])
def test_counts_fit_the_workers_columns(params: SamplingParams) -> None:
    assert "2147483647" in refusal_of(sampling_params=params)
