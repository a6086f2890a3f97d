"""Log-probabilities leave with their tokens, and what comes behind the end of the text is dropped with its tokens."""

from array import array

import pytest

from millstream.common.finish_reason import FINISH_LENGTH, FinishReason
from millstream.common.logprobs import LogprobBuffer, TokenLogprobs
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.text_messages import BatchTokenIDOutput, RequestEnd, RequestStats, StreamStart, StrOutput
from millstream.detokenizer.detokenizer import Detokenizer
from tests.detokenizer.reference_text import start_of
from tests.text.sample_tokenizers import smollm2

IDS = smollm2().encode("One two STOP three", add_special_tokens=False)
PROMPT = TokenLogprobs(array("f", [-0.5, -0.25]).tobytes())


def logprobs_of(token_ids: list[int]) -> TokenLogprobs:
    """Each token's id in every column, with two likeliest tokens and one that is asked for."""
    twice = [token_id for token_id in token_ids for _ in range(2)]
    own = array("f", token_ids).tobytes()
    return TokenLogprobs(own, pack_int32(twice), array("f", twice).tobytes(), own)


def message(
    token_ids: list[int], reason: FinishReason | None = None, start: StreamStart | None = None
) -> BatchTokenIDOutput:
    ends = [] if reason is None else [RequestEnd("r", reason, len(token_ids), RequestStats(3, 0, 0))]
    return BatchTokenIDOutput(
        starts=[] if start is None else [start],
        rids=["r"],
        generations=pack_int32([0]),
        cached_tokens=pack_int32([0]),
        num_tokens=pack_int32([len(token_ids)]),
        token_ids=pack_int32(token_ids),
        ends=ends,
        logprobs={"r": logprobs_of(token_ids), "gone": logprobs_of(token_ids)},
        prompt_logprobs={} if start is None else {"r": PROMPT},
    )


def run(pieces: list[list[int]], *, stream: bool, stop: tuple[str, ...] = ()) -> list[StrOutput]:
    """The outputs of a request whose tokens come in these pieces."""
    detokenizer, outputs = Detokenizer(smollm2()), list[StrOutput]()
    start = start_of(stream=stream, stop=stop)
    for index, piece in enumerate(pieces):
        reason = FINISH_LENGTH(len(IDS)) if index == len(pieces) - 1 else None
        outputs += detokenizer.handle(message(piece, reason, None if index else start)).outputs
    return outputs


def check(outputs: list[StrOutput], expected_ids: list[int]) -> None:
    """Each output has those of its tokens; the first with tokens, those of the prompt."""
    found: list[int] = []
    for output in outputs:
        ids = unpack_int32(output.token_ids)
        assert output.logprobs == (logprobs_of(ids) if ids else None)
        found += ids
    assert found == expected_ids
    assert [output.prompt_logprobs for output in outputs] == [PROMPT, *[None] * (len(outputs) - 1)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 2, len(IDS)])
def test_they_leave_with_their_tokens(stream: bool, size: int) -> None:
    pieces = [IDS[at : at + size] for at in range(0, len(IDS), size)]
    outputs = run(pieces, stream=stream)
    assert len(outputs) == (len(pieces) if stream else 1)
    check(outputs, IDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 3, len(IDS)])
def test_those_behind_a_stop_string_are_dropped(stream: bool, size: int) -> None:
    pieces = [IDS[at : at + size] for at in range(0, len(IDS), size)]
    outputs = run(pieces, stream=stream, stop=("STOP",))
    num_tokens = next(output.end.completion_tokens for output in outputs if output.end)
    assert num_tokens < len(IDS)
    assert "".join(output.text for output in outputs) == "One two "
    check(outputs, IDS[:num_tokens])


def test_a_buffer_gives_back_what_it_took_in_any_pieces() -> None:
    buffer = LogprobBuffer()
    assert buffer.take() is None
    buffer.add(logprobs_of([1, 2, 3]))
    buffer.add(logprobs_of([4]))
    assert buffer.take(0) is None
    assert buffer.take(2) == logprobs_of([1, 2])
    buffer.add(logprobs_of([5]))
    assert len(buffer) == 3
    assert buffer.take(9) == logprobs_of([3, 4, 5])
    assert buffer.take() is None
    assert logprobs_of([7, 8, 9]).first(2) == logprobs_of([7, 8])
