"""A mark that makes plain text of what a tokenizer would take for a special token: it stands within the token's text,
and is dropped once special tokens have been looked for. So the text is tokenized as if it stood there without the mark.
Some models know the text of a special token as a piece of their own: for them it is split behind its first character.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

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
        split = pre_tokenizers.Split(tokenizers.Regex(_first_characters(found)), "isolated")
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


def _first_characters(texts: Iterable[str]) -> str:
    """A pattern of the first character of each text, where the rest follows. What texts have in common is tried once."""
    groups = [(group[0][0], [text[1:] for text in group]) for group in _by_first_character(texts)]
    return "|".join(f"{re.escape(first)}(?={_beginning(rests)})" for first, rests in groups)


def _beginning(texts: Sequence[str]) -> str:
    """A pattern that matches where one of the texts begins."""
    first, last = min(texts), max(texts)
    num_common = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    head = re.escape(first[:num_common])
    if num_common == len(first):
        return head
    return f"{head}(?:{'|'.join(map(_beginning, _by_first_character(text[num_common:] for text in texts)))})"


def _by_first_character(texts: Iterable[str]) -> Iterable[list[str]]:
    groups = defaultdict(list)
    for text in texts:
        groups[text[0]].append(text)
    return groups.values()


def _as_it_is(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )
