"""The scheduler's own check of requests: a refusal is an end through the detokenizer, never an exception."""

import msgspec
import pytest

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH
from millstream.common.messages import TokenizedGenerateReqInput, pack_int32
from millstream.common.sampling_params import SamplingParams
from tests.scheduler.harness import VOCAB_SIZE, Client, Harness

GOOD = TokenizedGenerateReqInput(
    rid="r",
    frontend="http",
    arrival=0.0,
    input_ids=pack_int32([1, 2]),
    sampling_params=SamplingParams(max_new_tokens=2),
)


def refusal_of(client: Client) -> FINISH_ABORT:
    assert len(client.starts) == len(client.ends) == 1
    reason = client.ends[0].finish_reason
    assert isinstance(reason, FINISH_ABORT)
    assert client.ends[0].num_tokens == 0
    return reason


@pytest.mark.parametrize("input_ids", [b"", b"abc", pack_int32([1, -1]), pack_int32([VOCAB_SIZE])])
def test_token_ids_that_are_none_or_outside_the_vocabulary_are_refused(input_ids: bytes) -> None:
    harness = Harness()
    reason = refusal_of(harness.send(msgspec.structs.replace(GOOD, input_ids=input_ids)))
    assert reason.status_code == 400


def test_a_bad_sampling_parameter_is_refused_by_its_name() -> None:
    reason = refusal_of(Harness().ask("r", [1], temperature=float("nan")))
    assert reason.status_code == 400
    assert "temperature" in reason.message
    assert reason.err_type == "BadRequestError"


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    reason = refusal_of(Harness(context_len=20).ask("r", [1] * 20))
    assert "20 tokens" in reason.message


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    reason = refusal_of(Harness(num_pages=5, page_size=4).ask("r", [1] * 21))
    assert reason.status_code == 400
    assert reason.err_type == "ContextLengthExceeded"
    assert "21" in reason.message
    assert "20" in reason.message


def test_a_request_that_breaks_the_check_itself_ends_alone() -> None:
    harness = Harness()
    broken = msgspec.structs.replace(GOOD, sampling_params=SamplingParams(top_k="many"))  # type: ignore[arg-type]
    assert refusal_of(harness.send(broken)).status_code == 500
    assert harness.ask("good", [1, 2], 3).output_ids == []
    harness.run()
    assert len(harness.clients["good"].output_ids) == 3


def test_max_new_tokens_is_clamped_to_the_context() -> None:
    harness = Harness(context_len=12)
    client, unlimited = harness.ask("r", [1] * 10, 50), harness.ask("s", [2] * 10, None)
    harness.run()
    assert client.ends[0].finish_reason == unlimited.ends[0].finish_reason == FINISH_LENGTH(2)


def test_a_request_may_fill_the_whole_pool_and_no_more() -> None:
    harness = Harness(num_pages=5, page_size=4)
    client = harness.ask("r", [1] * 10, 50)
    harness.run()
    assert client.ends[0].finish_reason == FINISH_LENGTH(11)  # the KV of the last token is never computed


def test_a_second_request_with_a_rid_in_use_is_dropped() -> None:
    harness = Harness()
    harness.ask("r", [1, 2], 3)
    harness.ask("r", [3, 4], 3)
    harness.run()
    assert len(harness.clients["r"].ends) == 1
