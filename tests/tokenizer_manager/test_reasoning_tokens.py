"""How many tokens of an answer were reasoning."""

import time

from hypothesis import given
from hypothesis import strategies as st

from millstream.tokenizer_manager.chat.chat_generation import count_tokens
from tests.tokenizer_manager.live_server import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text("ab\u00e9\U0001f600", max_size=20), st.lists(st.integers(0, 22), max_size=8).map(sorted))
def test_a_token_counts_if_it_begins_in_a_span(text: str, cuts: list[int]) -> None:
    """Tokens are bytes here; the first of a character begins with it, and the others where the next character does."""
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    starts = [place + (i > 0) for place, char in enumerate(text) for i in range(len(char.encode()))]
    expected = sum(any(start <= place < end for start, end in spans) for place in starts)
    assert count_tokens(TOKENIZER, TOKENIZER.encode(text, False), spans) == expected


def test_cost_is_linear_in_tokens_and_spans() -> None:
    token_ids, spans = [97] * 100_000, [(place, place + 1) for place in range(0, 100_000, 2)]
    started = time.process_time()
    assert count_tokens(TOKENIZER, token_ids, spans) == 50_000
    assert time.process_time() - started < 1.0
