"""The one final answer of a request with stop regexes: order of ends, exactness inside a message, failure."""

import pytest

from millstream.common.finish_reason import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
    FinishReason,
)
from millstream.common.messages import pack_int32
from millstream.common.text_messages import StrEnd, StrOutput, TextEnded
from millstream.detokenizer.detokenizer import Detokenizer, DetokenizerOutput
from tests.detokenizer.reference_text import start_of
from tests.detokenizer.test_detokenizer import STATS, end_of, ids_of, message, texts
from tests.text.sample_tokenizers import smollm2

WORLD = ids_of(" world")[0]


@pytest.mark.parametrize("reason", [FINISH_MATCHED_TOKEN(WORLD), FINISH_LENGTH(1), FINISH_ABORT("x", 499, "x"), None])
@pytest.mark.parametrize(
    ("stop", "stop_regex", "text", "text_end"),
    [
        (("rl",), ("w.r",), " wo", FINISH_MATCHED_STR("rl")),
        ((), ("w.r",), " ", FINISHED_MATCHED_REGEX("w.r")),
        ((), ("zz", "[o]r"), " w", FINISHED_MATCHED_REGEX("[o]r")),
    ],
)
def test_at_one_token_a_stop_string_comes_before_a_regex_and_a_regex_before_every_token_end(
    stop: tuple[str, ...],
    stop_regex: tuple[str, ...],
    text: str,
    text_end: FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX,
    reason: FinishReason | None,
) -> None:
    detokenizer = Detokenizer(smollm2())
    ends = [] if reason is None else [end_of(1, reason)]
    done = detokenizer.handle(message([start_of(stop=stop, stop_regex=stop_regex)], {"r": [WORLD]}, ends))
    assert [(output.text, output.end and output.end.finish_reason) for output in done.outputs] == [(text, text_end)]
    assert done.text_ends == [TextEnded("r", 0, 1)]
    assert detokenizer.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("pattern", "text", "count"),
    [("t[wo]+", "one ", 2), (r"\btwo\b", "one ", 2), ("(?i)TWO", "one ", 2), ("n.* t", "o", 2), ("n.* th", "o", 3)],
)
def test_an_end_in_the_middle_of_a_message_is_exact(pattern: str, text: str, count: int, *, stream: bool) -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two three four")
    start = start_of(stop_regex=(pattern,), stream=stream)
    done = detokenizer.handle(message([start], {"r": ids}, [end_of(4, FINISH_LENGTH(4))], generation=3))
    answer = StrEnd(FINISHED_MATCHED_REGEX(pattern), count, STATS)
    assert done.outputs == [StrOutput("r", text, pack_int32(ids[:count]), answer)]
    assert done.text_ends == [TextEnded("r", 3, count)]


def test_what_may_begin_a_match_is_held_back_and_comes_out_when_it_is_none() -> None:
    detokenizer = Detokenizer(smollm2())
    start = start_of(stop_regex=("three [a-z]+ five",))
    ids = ids_of("one two three four six")
    pieces = [texts(detokenizer.handle(message([start] if i == 0 else [], {"r": [ids[i]]})))[0] for i in range(5)]
    assert pieces == ["one", " two", " ", "", "three four six"]


@pytest.mark.parametrize("reason", [FINISH_LENGTH(2), FINISH_ABORT("gone", 499, "aborted")])
def test_held_back_text_is_flushed_by_any_end(reason: FinishReason) -> None:
    detokenizer = Detokenizer(smollm2())
    assert texts(detokenizer.handle(message([start_of(stop_regex=("two+ three",))], {"r": ids_of("one two")}))) == [
        "one "
    ]
    assert texts(detokenizer.handle(message(ends=[end_of(2, reason)]))) == ["two"]


def test_regexes_do_not_count_before_min_new_tokens() -> None:
    detokenizer = Detokenizer(smollm2())
    start = start_of(stream=False, stop_regex=("t.o",), min_new_tokens=3)
    done = detokenizer.handle(message([start], {"r": ids_of("two two two two")}))
    assert done.outputs[0].text == "two two "
    assert done.text_ends == [TextEnded("r", 0, 3)]


def test_a_match_that_begins_before_min_new_tokens_may_end_after_it() -> None:
    detokenizer = Detokenizer(smollm2())
    start = start_of(stop_regex=("two th",), min_new_tokens=3)
    ids = ids_of("one two three")
    assert texts(detokenizer.handle(message([start], {"r": ids[:2]}))) == ["one "]
    assert detokenizer.handle(message(tokens={"r": ids[2:]})).text_ends == [TextEnded("r", 0, 3)]


@pytest.mark.parametrize(
    "pattern", ["(", r"\1", "(?=a)", "x{900}", "x*", "x{99999999999}", "a(?i)*", r"\n(?i){0}\B", "x{01}"]
)
def test_a_regex_that_does_not_compile_fails_its_request_and_no_other(pattern: str) -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two")
    starts = [start_of("bad", stop_regex=(pattern,)), start_of("good", stop_regex=("t.o",))]
    done = detokenizer.handle(message(starts, {"bad": ids[:1], "good": ids[:1]}))
    bad, good = done.outputs
    assert bad.end is not None
    assert isinstance(bad.end.finish_reason, FINISH_ABORT)
    assert (bad.rid, bad.text, bad.token_ids, bad.end.completion_tokens) == ("bad", "", b"", 0)
    assert bad.end.finish_reason.status_code == 500
    assert "stop_regex" in bad.end.finish_reason.message
    assert (good.rid, good.text, good.end) == ("good", "one", None)
    assert done.text_ends == [TextEnded("bad", 0, 0)]
    last = detokenizer.handle(
        message(tokens={"bad": ids[1:], "good": ids[1:]}, ends=[end_of(2, FINISH_LENGTH(2), "bad")])
    )
    assert last.text_ends == [TextEnded("good", 0, 2)]
    assert [output.rid for output in last.outputs] == ["good"]


def test_a_request_whose_regex_fails_in_its_last_message_is_answered_once() -> None:
    detokenizer = Detokenizer(smollm2())
    done = detokenizer.handle(message([start_of(stop_regex=("(",))], {"r": [WORLD]}, [end_of(1, FINISH_LENGTH(1))]))
    assert len(done.outputs) == 1
    assert detokenizer.num_open == 0
    assert detokenizer.handle(message(tokens={"r": [WORLD]})) == DetokenizerOutput([], [])
