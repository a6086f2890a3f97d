"""The one final answer of every request: who ends it, with what text, and what it costs."""

from collections.abc import Iterable, Sequence

import pytest
from tokenizers import Tokenizer as Backend

from millstream.common.finish_reason import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FinishReason,
)
from millstream.common.incremental_decoder import make_decoder
from millstream.common.messages import pack_int32
from millstream.common.text_messages import (
    BatchTokenIDOutput,
    RequestEnd,
    RequestStats,
    StreamStart,
    StrEnd,
    StrOutput,
    TextEnded,
)
from millstream.common.tokenizer import Tokenizer
from millstream.common.tokenizer_parts import TokenizerParts
from millstream.detokenizer.detokenizer import Detokenizer, DetokenizerOutput
from tests.detokenizer.reference_text import start_of
from tests.text.sample_tokenizers import (
    byte_level_backend,
    metaspace_backend,
    sentencepiece_backend,
    smollm2,
    tokenizer_of,
)

STATS = RequestStats(7, 4, 2)
IM_END = 2


def ids_of(text: str) -> list[int]:
    return smollm2().encode(text, add_special_tokens=False)


def message(
    starts: Sequence[StreamStart] = (),
    tokens: dict[str, list[int]] | None = None,
    ends: Sequence[RequestEnd] = (),
    generation: int = 0,
) -> BatchTokenIDOutput:
    tokens = tokens or {}
    return BatchTokenIDOutput(
        starts=list(starts),
        rids=list(tokens),
        generations=pack_int32([generation] * len(tokens)),
        cached_tokens=pack_int32([4] * len(tokens)),
        num_tokens=pack_int32(map(len, tokens.values())),
        token_ids=pack_int32(token_id for ids in tokens.values() for token_id in ids),
        ends=list(ends),
    )


def end_of(num_tokens: int, reason: FinishReason, rid: str = "r") -> RequestEnd:
    return RequestEnd(rid, reason, num_tokens, STATS)


def texts(done: DetokenizerOutput) -> list[str]:
    return [output.text for output in done.outputs]


def test_an_eos_token_is_counted_and_sent_but_has_no_text() -> None:
    detokenizer = Detokenizer(smollm2())
    (hello,) = ids_of("Hello")
    first = detokenizer.handle(message([start_of(skip_special_tokens=False)], {"r": [hello]}))
    assert first.outputs == [StrOutput("r", "Hello", pack_int32([hello]))]
    reason = FINISH_MATCHED_TOKEN(IM_END)
    last = detokenizer.handle(message(tokens={"r": [IM_END]}, ends=[end_of(2, reason)]))
    assert last.outputs == [StrOutput("r", "", pack_int32([IM_END]), StrEnd(reason, 2, STATS))]
    assert last.text_ends == []


def test_no_stop_trim_keeps_the_text_of_a_stop_token() -> None:
    detokenizer = Detokenizer(smollm2())
    stop_id = ids_of(" world")[0]
    start = start_of(no_stop_trim=True)
    done = detokenizer.handle(message([start], {"r": [stop_id]}, [end_of(1, FINISH_MATCHED_TOKEN(stop_id))]))
    assert texts(done) == [" world"]


def test_a_stop_token_that_is_ordinary_text_leaves_no_text() -> None:
    detokenizer = Detokenizer(smollm2())
    hello, world = ids_of("Hello")[0], ids_of(" world")[0]
    done = detokenizer.handle(message([start_of()], {"r": [hello, world]}, [end_of(2, FINISH_MATCHED_TOKEN(world))]))
    assert texts(done) == ["Hello"]


def test_at_one_token_a_stop_string_comes_before_a_stop_id_and_before_the_length() -> None:
    world = ids_of(" world")[0]
    for reason in (FINISH_MATCHED_TOKEN(world), FINISH_LENGTH(1)):
        detokenizer = Detokenizer(smollm2())
        done = detokenizer.handle(message([start_of(stop=("wor",))], {"r": [world]}, [end_of(1, reason)]))
        answer = StrEnd(FINISH_MATCHED_STR("wor"), 1, STATS)
        assert done.outputs == [StrOutput("r", " ", pack_int32([world]), answer)]
        assert done.text_ends == [TextEnded("r", 0, 1)]


def test_a_stop_string_at_an_earlier_token_overrides_the_token_end_and_drops_what_follows() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two three four")
    done = detokenizer.handle(
        message([start_of(stop=("two",))], {"r": ids}, [end_of(4, FINISH_LENGTH(4))], generation=3)
    )
    assert done.outputs == [StrOutput("r", "one ", pack_int32(ids[:2]), StrEnd(FINISH_MATCHED_STR("two"), 2, STATS))]
    assert done.text_ends == [TextEnded("r", 3, 2)]


def test_after_a_text_end_nothing_of_the_request_is_heard_again() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two three four")
    done = detokenizer.handle(message([start_of(stop=("two",))], {"r": ids[:2]}, generation=1))
    stats = RequestStats(prompt_tokens=7, cached_tokens=4, num_retractions=1)
    assert done.outputs[0].end == StrEnd(FINISH_MATCHED_STR("two"), 2, stats)
    assert detokenizer.num_open == 0
    late = detokenizer.handle(message(tokens={"r": ids[2:]}, ends=[end_of(4, FINISH_ABORT("late", 499, "x"))]))
    assert late == DetokenizerOutput([], [])


def test_the_beginning_of_a_stop_string_is_held_back_and_comes_out_when_it_is_none() -> None:
    detokenizer = Detokenizer(smollm2())
    start = start_of(stop=("three four five",))
    ids = ids_of("one two three four six")
    pieces = [texts(detokenizer.handle(message([start] if i == 0 else [], {"r": [ids[i]]})))[0] for i in range(5)]
    assert pieces == ["one", " two", " ", "", "three four six"]


@pytest.mark.parametrize("reason", [FINISH_LENGTH(3), FINISH_ABORT("gone", 499, "aborted"), FINISH_MATCHED_TOKEN(2)])
def test_held_back_text_is_flushed_by_any_end(reason: FinishReason) -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two")
    assert texts(detokenizer.handle(message([start_of(stop=("two three",))], {"r": ids}))) == ["one "]
    assert texts(detokenizer.handle(message(tokens={"r": [IM_END]}, ends=[end_of(3, reason)]))) == ["two"]


def test_an_incomplete_character_is_held_and_shown_as_u_fffd_only_by_the_end() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("\U0001f600")
    assert len(ids) > 1
    assert texts(detokenizer.handle(message([start_of()], {"r": ids[:1]}))) == [""]
    done = detokenizer.handle(message(ends=[end_of(1, FINISH_LENGTH(1))]))
    assert texts(done) == [smollm2().decode(ids[:1])] == ["\ufffd"]


def test_outputs_complete_a_character_that_the_prompt_began() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("\U0001f600")
    start = start_of(context_ids=[*ids_of("Hi "), *ids[:1]])
    done = detokenizer.handle(message([start], {"r": ids[1:]}))
    assert texts(done) == ["\U0001f600"]


def test_a_first_word_keeps_its_space_after_text_and_loses_it_at_the_start() -> None:
    tokenizer = tokenizer_of(sentencepiece_backend())
    ids = tokenizer.encode("hello", add_special_tokens=False)
    for context, text in ([], "hello"), ([1], "hello"), (ids, " hello"):
        detokenizer = Detokenizer(tokenizer)
        done = detokenizer.handle(
            message([start_of(context_ids=context)], {"r": ids}, [end_of(len(ids), FINISH_LENGTH(len(ids)))])
        )
        assert texts(done) == [text]


def test_a_request_that_does_not_stream_gets_one_output_with_everything() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two three")
    assert detokenizer.handle(message([start_of(stream=False)], {"r": ids[:1]})).outputs == []
    assert detokenizer.handle(message(tokens={"r": ids[1:2]})).outputs == []
    reason = FINISH_LENGTH(3)
    done = detokenizer.handle(message(tokens={"r": ids[2:]}, ends=[end_of(3, reason)]))
    assert done.outputs == [StrOutput("r", "one two three", pack_int32(ids), StrEnd(reason, 3, STATS))]


def test_a_refusal_without_any_token_is_answered() -> None:
    detokenizer = Detokenizer(smollm2())
    reason = FINISH_ABORT("too long", 400, "BadRequestError")
    done = detokenizer.handle(message([start_of()], ends=[end_of(0, reason)]))
    assert done.outputs == [StrOutput("r", "", b"", StrEnd(reason, 0, STATS))]


def test_an_abort_keeps_the_text_so_far() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two")
    detokenizer.handle(message([start_of(stream=False)], {"r": ids}))
    reason = FINISH_ABORT("gone", 499, "aborted")
    done = detokenizer.handle(message(ends=[end_of(2, reason)]))
    assert done.outputs == [StrOutput("r", "one two", pack_int32(ids), StrEnd(reason, 2, STATS))]


def test_stop_strings_do_not_count_before_min_new_tokens() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("two two two two")
    start = start_of(stream=False, stop=("two",), min_new_tokens=3)
    done = detokenizer.handle(message([start], {"r": ids}))
    assert done.outputs[0].text == "two two "
    assert done.text_ends == [TextEnded("r", 0, 3)]


def test_requests_are_apart_and_their_outputs_keep_the_order_of_the_message() -> None:
    detokenizer = Detokenizer(smollm2())
    starts = [start_of(rid) for rid in "abc"]
    ids = [ids_of(text) for text in ("\U0001f600", "\U0001f601", "plain")]
    first = detokenizer.handle(message(starts, {rid: ids[i][:1] for i, rid in enumerate("abc")}))
    assert [output.rid for output in first.outputs] == ["a", "b", "c"]
    second = detokenizer.handle(message(tokens={"b": ids[1][1:], "a": ids[0][1:]}))
    assert [(output.rid, output.text) for output in second.outputs] == [("b", "\U0001f601"), ("a", "\U0001f600")]
    assert detokenizer.num_open == 3


def test_a_request_that_resumes_just_goes_on() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = ids_of("one two three")
    detokenizer.handle(message([start_of(stop=("three",))], {"r": ids[:2]}, generation=0))
    done = detokenizer.handle(message(tokens={"r": ids[2:]}, generation=1))
    assert done.text_ends == [TextEnded("r", 1, 3)]


@pytest.mark.parametrize("backend", [sentencepiece_backend(), metaspace_backend()])
def test_a_peek_tells_what_comes_and_changes_nothing(backend: Backend) -> None:
    tokenizer = tokenizer_of(backend)
    ids = tokenizer.encode(" hello w\u00f6rld", add_special_tokens=False)
    decoder, untouched = (make_decoder(tokenizer, [], skip_special_tokens=True) for _ in range(2))
    for token_id in ids:
        for other in (token_id, ids[0]):
            decoder.peek(other)
        expected = untouched.feed(token_id)
        assert decoder.peek(token_id) == expected
        assert decoder.feed(token_id) == expected


class CountingTokenizer(Tokenizer):
    """Counts the ids that are decoded."""

    num_decoded = 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens)

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        ids = list(ids)
        self.num_decoded += len(ids)
        return super().decode_bytes(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@pytest.mark.parametrize("content", ["text", "incomplete", "nothing"])
def test_ten_thousand_tokens_cost_ten_thousand_times_one(kind: str, content: str) -> None:
    backend = byte_level_backend() if kind == "byte level" else metaspace_backend()
    tokenizer = CountingTokenizer(TokenizerParts(backend, {}, [], {}))
    unknown, half = tokenizer.vocab_size + 1, tokenizer.token_to_id("\u00e4") or 0  # the byte 0xE4, where it is one
    ids = {"text": tokenizer.encode("hello world"), "incomplete": [half], "nothing": [unknown]}[content] * 10_000
    detokenizer = Detokenizer(tokenizer)
    detokenizer.handle(message([start_of(context_ids=ids[:5], skip_special_tokens=False)]))
    for token_id in ids[:10_000]:
        detokenizer.handle(message(tokens={"r": [token_id]}))
    assert tokenizer.num_decoded <= (5 if kind == "byte level" else 10_000 * 24)
