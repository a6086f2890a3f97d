"""The model's tokenizer as llguidance reads it, so that its masks speak of our token ids.

Imports llguidance: only the child that checks grammars and the rank that samples come here.
"""

from collections.abc import Sequence

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from .tokenizer import Tokenizer

# What one grammar may cost, in llguidance's units: up to 200 ms to compile, and some 15 ms for a mask (70 ms where
# 32 KiB of Lark are one lexeme).
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
LEXER_FUEL = 1_000_000


def make_grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """For masks of `vocab_size` tokens, as many as there are logits; ids without a token are never allowed.

    ValueError where llguidance can't read this tokenizer.
    """
    eos_token_ids = list(tokenizer.eos_token_ids)
    if tokenizer.token_bytes is None:
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=eos_token_ids)
    return LLTokenizer(TokenizerWrapper(_Bytes(tokenizer, vocab_size)), n_vocab=vocab_size, eos_token=eos_token_ids)


def parser_limits() -> LLParserLimits:
    """Limits of every grammar, the same wherever it is compiled."""
    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


class _Bytes:
    """What TokenizerWrapper asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        assert tokenizer.token_bytes is not None
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes[token_id] for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
