"""Prompts of an exact number of tokens, for every server the same text.

Words that are one token each, at the beginning of a text and behind a space, so that the number of words is that of
tokens. No two prompts of a run begin with the same word (but for a shared prefix, which begins with one of its own): not
even one token can come out of a server's cache.
"""

import random
import re

from millstream.common.tokenizer import Tokenizer

WORD = re.compile("[a-z]{3,10}")
NUM_TOKEN_IDS = 12_000  # the first of a vocabulary are its commonest


class PromptMaker:
    """Prompts of one run, drawn from a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._words = one_token_words(tokenizer)
        self._first_words = self._random.sample(self._words, len(self._words))

    def make(self, num_tokens: int, prefix: str = "") -> str:
        """A prompt of so many tokens, a special token at its beginning counted; with a prefix, so many more than it."""
        num_words = num_tokens if prefix else num_tokens - self._tokenizer.add_bos
        words = [self._first_words.pop(), *self._random.choices(self._words, k=num_words - 1)]
        prompt = " ".join([prefix, *words] if prefix else words)
        found = len(self._tokenizer.encode(prompt))
        expected = num_tokens + (len(self._tokenizer.encode(prefix)) if prefix else 0)
        assert found == expected, f"{found} tokens in place of {expected}"
        return prompt


def one_token_words(tokenizer: Tokenizer) -> list[str]:
    """Common lower-case words that are one token with and without a space before them."""
    texts = [tokenizer.decode([token_id]) for token_id in range(min(NUM_TOKEN_IDS, tokenizer.vocab_size))]
    words = sorted({text.strip() for text in texts if WORD.fullmatch(text.strip())})
    bare, spaced = (
        tokenizer.encode_batch([before + word for word in words], add_special_tokens=False) for before in ("", " ")
    )
    return [word for word, one, other in zip(words, bare, spaced, strict=True) if len(one) == len(other) == 1]
