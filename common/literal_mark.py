"""A mark that makes plain text of what a tokenizer would take for a special token: it stands within the token's text,
and is dropped once special tokens have been looked for. So the text is tokenized as if it stood there without the mark.
Some models know the text of a special token as a piece of their own: for them it is split behind its first character.
"""

import re

import tokenizers
from tokenizers import normalizers, pre_tokenizers

MARK = "\ufdd0"  # no character, by Unicode's definition


def drop_marks(backend: tokenizers.Tokenizer) -> None:
    """Have a tokenizer do so. Special tokens are looked for in the text as it is, and not in what it is normalised to."""
    given = backend.normalizer
    steps = [normalizers.Replace(MARK, "")]
    backend.normalizer = normalizers.Sequence(steps if given is None else [*steps, given])
    backend.add_special_tokens([_as_it_is(token) for token in _special_tokens(backend) if token.normalized])
    if found := [token.content for token in _special_tokens(backend) if _comes_of_text(backend, token.content)]:
        firsts = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in found)
        split = pre_tokenizers.Split(tokenizers.Regex(firsts), "isolated")
        given_splits = backend.pre_tokenizer
        backend.pre_tokenizer = split if given_splits is None else pre_tokenizers.Sequence([given_splits, split])


def _special_tokens(backend: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
    return [token for token in backend.get_added_tokens_decoder().values() if token.special]


def _comes_of_text(backend: tokenizers.Tokenizer, text: str) -> bool:
    """Whether the model, asked for a text that holds a special token's, would give that token."""
    if len(text) < 2 or backend.token_to_id(text) not in [token.id for token in backend.model.tokenize(text)]:
        return False
    splits = backend.pre_tokenizer
    shown = [f"{around}{text}{around}" for around in ("", " ", "a")]
    return splits is None or any(text in piece for each in shown for piece, _ in splits.pre_tokenize_str(each))


def _as_it_is(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )
