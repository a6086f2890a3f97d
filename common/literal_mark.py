"""A mark that makes plain text of what a tokenizer would take for a special token: it stands within the token's text,
and is dropped once special tokens have been looked for. So the text is tokenized as if it stood there without the mark.
"""

import tokenizers
from tokenizers import normalizers

MARK = "\ufdd0"  # no character, by Unicode's definition


def drop_marks(backend: tokenizers.Tokenizer) -> None:
    """Have a tokenizer do so. Special tokens are looked for in the text as it is, and not in what it is normalised to."""
    given = backend.normalizer
    steps = [normalizers.Replace(MARK, "")]
    backend.normalizer = normalizers.Sequence(steps if given is None else [*steps, given])
    special = [token for token in backend.get_added_tokens_decoder().values() if token.special and token.normalized]
    backend.add_special_tokens([_as_it_is(token) for token in special])


def _as_it_is(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )
