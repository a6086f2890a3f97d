"""The vector of a prompt comes with its one answer, and that of a request that is gone comes nowhere."""

from array import array

from millstream.common.finish_reason import FINISH_LENGTH
from millstream.common.text_messages import BatchTokenIDOutput, RequestEnd, RequestStats, StrEnd, StrOutput
from millstream.detokenizer.detokenizer import Detokenizer
from tests.detokenizer.reference_text import start_of
from tests.text.sample_tokenizers import smollm2

VECTOR = array("f", [0.6, 0.8]).tobytes()
STATS = RequestStats(7, 4, 2)


def test_a_vector_comes_with_the_answer_and_without_text() -> None:
    ends = [RequestEnd("a", FINISH_LENGTH(0), 0, STATS), RequestEnd("gone", FINISH_LENGTH(0), 0, STATS)]
    message = BatchTokenIDOutput(
        starts=[start_of("a")],
        rids=[],
        generations=b"",
        cached_tokens=b"",
        num_tokens=b"",
        token_ids=b"",
        ends=ends,
        embeddings={"a": VECTOR, "gone": VECTOR},
    )
    done = Detokenizer(smollm2()).handle(message)
    answer = StrEnd(FINISH_LENGTH(0), 0, STATS)
    assert done.outputs == [StrOutput("a", "", b"", answer, embedding=VECTOR)]
    assert done.text_ends == []
