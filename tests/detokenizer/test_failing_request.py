"""A request that can't be handled ends alone: one answer, a 500, its pages freed, a traceback in the log."""

import logging

import pytest

from millstream.common.finish_reason import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_STR
from millstream.common.messages import pack_int32
from millstream.common.text_messages import RequestStats, StrEnd, StrOutput, TextEnded
from millstream.detokenizer.detokenizer import Detokenizer, DetokenizerOutput, make_or_abort
from tests.detokenizer.reference_text import start_of
from tests.detokenizer.test_detokenizer import end_of, message
from tests.text.sample_tokenizers import metaspace_backend, tokenizer_of

TOKENIZER = tokenizer_of(metaspace_backend())
HELLO = TOKENIZER.encode("hello hello", add_special_tokens=False)
UNDECODABLE = -1  # no token: the tokenizers package raises OverflowError
FAILED = FINISH_ABORT("The text of the request could not be made.", 500, "InternalServerError")


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_a_request_that_cannot_be_opened_is_answered_and_no_other_is_disturbed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    starts = [start_of("before"), start_of("bad", context_ids=[UNDECODABLE]), start_of("after")]
    done = detokenizer.handle(message(starts, dict.fromkeys(("before", "bad", "after"), HELLO)))
    assert done.outputs[0] == StrOutput("bad", "", b"", StrEnd(FAILED, 0, RequestStats(7, 0, 0)))
    assert [(output.rid, output.text, output.end) for output in done.outputs[1:]] == [
        ("before", "hello hello", None),
        ("after", "hello hello", None),
    ]
    assert done.text_ends == [TextEnded("bad", 0, 0)]
    check_log(caplog, "bad", "OverflowError")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("has_end", [True, False])
def test_a_request_whose_token_cannot_be_decoded_ends_there_with_the_text_so_far(
    caplog: pytest.LogCaptureFixture, *, stream: bool, has_end: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    starts = [start_of("bad", stream=stream), start_of("good", stop=("lo h",))]
    ids = [*HELLO, UNDECODABLE, *HELLO]
    ends = [end_of(len(ids), FINISH_LENGTH(len(ids)), "bad")] if has_end else []
    done = detokenizer.handle(message(starts, {"bad": ids, "good": HELLO}, ends, generation=3))
    bad, good = done.outputs
    num_tokens = len(HELLO) + 1
    assert bad.end is not None
    assert (bad.text, bad.token_ids) == ("hello hello", pack_int32(ids[:num_tokens]))
    assert (bad.end.finish_reason, bad.end.completion_tokens) == (FAILED, num_tokens)
    assert good.end is not None
    assert good.end.finish_reason == FINISH_MATCHED_STR("lo h")
    assert done.text_ends[0] == TextEnded("bad", 3, num_tokens)
    check_log(caplog, "bad", "OverflowError")
    assert detokenizer.num_open == 0
    late = message(tokens={"bad": HELLO}, ends=[end_of(9, FINISH_LENGTH(9), "bad")])
    assert detokenizer.handle(late) == DetokenizerOutput([], [])


@pytest.mark.parametrize("drops_text", [True, False])
def test_what_fails_at_the_end_by_token_is_one_500(*, drops_text: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [*HELLO, UNDECODABLE]
    start = start_of(stop=("zz",), no_stop_trim=not drops_text)
    done = detokenizer.handle(message([start], {"r": ids}, [end_of(len(ids), FINISH_LENGTH(len(ids)))]))
    assert [output.end and output.end.finish_reason for output in done.outputs] == [FAILED]


def test_a_regex_that_does_not_compile_leaves_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    done = Detokenizer(TOKENIZER).handle(message([start_of(stop_regex=("x{99999999999}",))]))
    assert done.text_ends == [TextEnded("r", 0, 0)]
    check_log(caplog, "r", "InvalidParam")


def test_a_panic_is_the_requests_end_and_an_exit_is_not() -> None:
    def panic() -> None:
        raise Panic

    def leave() -> None:
        raise SystemExit(3)

    assert make_or_abort("r", panic) == FAILED
    with pytest.raises(SystemExit):
        make_or_abort("r", leave)


def check_log(caplog: pytest.LogCaptureFixture, rid: str, error: str) -> None:
    """One line of level ERROR, with the request and the traceback."""
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert f"request {rid}:" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is not None
    assert record.exc_info[0].__name__ == error
