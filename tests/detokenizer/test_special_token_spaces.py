"""spaces_between_special_tokens: false writes a special token behind another without the decoder's space."""

import pytest
import tokenizers

from millstream.common.incremental_decoder import make_decoder
from millstream.common.tokenizer import Tokenizer
from millstream.common.tokenizer_parts import TokenizerParts

IDS = [0, 2, 3, 1, 3, 2]  # one <a> <b> two <b> <a>


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Its decoder puts a space before every word, special tokens included."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"one": 0, "two": 1, "<a>": 2, "<b>": 3}, unk_token="one")
    )
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["<a>", "<b>"])
    return Tokenizer(TokenizerParts(backend, {}, [], {}))


@pytest.mark.parametrize(("spaces", "expected"), [(True, "one <a> <b> two <b> <a>"), (False, "one <a><b> two <b><a>")])
def test_spaces_between_special_tokens_are_dropped_on_demand(tokenizer: Tokenizer, spaces: bool, expected: str) -> None:
    decoder = make_decoder(tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=spaces)
    pieces = []
    for token_id in IDS:
        peeked = decoder.peek(token_id)
        pieces.append(decoder.feed(token_id))
        assert pieces[-1] == peeked
    assert "".join(pieces) + decoder.flush() == expected
