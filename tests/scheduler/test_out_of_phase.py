"""A result that does not answer the oldest step in flight ends the server: nothing may go on from a wrong account."""

from collections.abc import Callable

import msgspec
import pytest

from millstream.common.batch_messages import BatchResult
from millstream.common.messages import pack_int32
from millstream.scheduler.schedule_batch import ProtocolError
from tests.scheduler.harness import Harness

Falsify = Callable[[BatchResult], BatchResult]


def with_two_steps_in_flight(decode_width: int = 1) -> Harness:
    harness = Harness(decode_width=decode_width)
    harness.ask("a", [1] * 6, 9)
    harness.ask("b", [2] * 6, 9)
    harness.step()
    while harness.plan():
        pass
    assert len(harness.results) == 2
    return harness


def replaced(**columns: object) -> Falsify:
    return lambda result: msgspec.structs.replace(result, **columns)


FALSE_RESULTS: dict[str, tuple[Falsify, str]] = {
    "of another step": (replaced(step=7), "got step 7"),
    "of other rows": (replaced(rows=pack_int32([1, 0])), "other rows"),
    "of fewer rows": (replaced(rows=pack_int32([0])), "other rows"),
    "of a row given out anew": (replaced(generations=pack_int32([1, 2])), "other rows"),
    "with a token too many": (replaced(token_ids=pack_int32([5, 5, 5])), "do not fit"),
    "with a column too short": (replaced(flags=pack_int32([0])), "do not fit"),
    "with a negative count": (replaced(num_tokens=pack_int32([-1, 3])), "do not fit"),
    "without a token for a row": (replaced(num_tokens=pack_int32([0, 2])), "0 tokens for row 0"),
    "with two tokens for a row": (replaced(num_tokens=pack_int32([2, 0])), "2 tokens for row 0"),
}


@pytest.mark.parametrize("name", FALSE_RESULTS)
def test_a_false_result_is_an_error(name: str) -> None:
    falsify, message = FALSE_RESULTS[name]
    harness = with_two_steps_in_flight()
    with pytest.raises(ProtocolError, match=message):
        harness.scheduler.process_batch_result(falsify(harness.results[0]), harness.now)


def test_results_in_the_wrong_order_are_an_error() -> None:
    harness = with_two_steps_in_flight()
    harness.results.reverse()
    with pytest.raises(ProtocolError, match="expected the result of step"):
        harness.answer()


def test_a_result_that_comes_twice_is_an_error() -> None:
    harness = with_two_steps_in_flight()
    result = harness.results[0]
    harness.answer()
    with pytest.raises(ProtocolError, match="expected the result of step"):
        harness.scheduler.process_batch_result(result, harness.now)


def test_a_result_that_nobody_waits_for_is_an_error() -> None:
    harness = with_two_steps_in_flight()
    result = harness.results[0]
    harness.run()
    with pytest.raises(ProtocolError, match="no step is in flight"):
        harness.scheduler.process_batch_result(result, harness.now)


def test_more_tokens_than_the_decode_width_are_an_error() -> None:
    harness = with_two_steps_in_flight(decode_width=2)
    result = msgspec.structs.replace(
        harness.results[0], num_tokens=pack_int32([3, 1]), token_ids=pack_int32([5, 5, 5, 5])
    )
    with pytest.raises(ProtocolError, match="3 tokens for row 0"):
        harness.scheduler.process_batch_result(result, harness.now)
