"""Text of a token stream, piece by piece: never half a character, never a second look at old tokens.

The text of a request is what its tokens add to its left context: with `context_ids` the last prompt tokens,

    text = decode(context_ids + output_ids) without the leading decode(context_ids)

where a character that the context left incomplete belongs to the outputs that complete it. So a first word keeps its
leading space after a prompt with text, and loses it (where the tokenizer's decoder strips one) after a context of
nothing but skipped special tokens. Pieces joined equal that text whatever the split into steps. An incomplete character
is held; only the end turns it into U+FFFD.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from .tokenizer import Tokenizer

MAX_HELD_TOKENS = 8  # of the window decoder: a character has at most 4 bytes, so more cannot complete one
REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """Turns token ids into text, one at a time."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""

    def peek(self, token_id: int) -> str:
        """What `feed` would return; changes nothing."""

    def flush(self) -> str:
        """The incomplete tail, as the decode of all tokens shows it."""


def make_decoder(
    tokenizer: Tokenizer,
    context_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
) -> IncrementalDecoder:
    """The exact and cheap decoder where the tokenizer joins bytes (it has no spaces of its own), else the window."""
    if tokenizer.token_bytes is not None:
        return ByteDecoder(tokenizer, context_ids, skip_special_tokens)
    return WindowDecoder(
        tokenizer, context_ids, skip_special_tokens, spaces_between_special_tokens=spaces_between_special_tokens
    )


class ByteDecoder:
    """For tokenizers whose text is their tokens' bytes: an incremental UTF-8 decoder; cost is that of the new bytes."""

    def __init__(self, tokenizer: Tokenizer, context_ids: Sequence[int], skip_special_tokens: bool) -> None:
        assert tokenizer.token_bytes is not None
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        context = tokenizer.decode_bytes(context_ids, skip_special_tokens)
        self._utf8.decode(context)
        self._at_start = self._token_bytes.strips_first_space and not context

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        new_bytes = self._token_bytes[token_id]
        if self._at_start and new_bytes:
            self._at_start = False
            new_bytes = new_bytes.removeprefix(b" ")
        return self._utf8.decode(new_bytes)

    def peek(self, token_id: int) -> str:
        """What `feed` would return; changes nothing."""
        state, at_start = self._utf8.getstate(), self._at_start
        text = self.feed(token_id)
        self._utf8.setstate(state)
        self._at_start = at_start
        return text

    def flush(self) -> str:
        """U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decodes a short window with and without its new tokens; the difference is new text.

    The window is a settled part, whose text is known, and the tokens held since. Tokens that add no text, or that end in
    an incomplete character, are held; at most MAX_HELD_TOKENS, so a step's cost has a bound. Exact for decoders in which
    a token's text depends on its neighbours only (Metaspace, WordPiece without clean-up).
    Without `spaces_between_special_tokens` a special token behind another is written as it is (as in vLLM).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_ids: Sequence[int],
        skip_special_tokens: bool,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._bare_ids = frozenset() if spaces_between_special_tokens else tokenizer.special_token_ids
        self._is_behind_special = False
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._settled = [token_id for token_id in context_ids if token_id not in self._skipped]
        self._settled_text = self._decode(self._settled)
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        is_behind_special, self._is_behind_special = self._is_behind_special, token_id in self._bare_ids
        if is_behind_special and self._is_behind_special:
            return self._feed_bare(token_id)
        self._held.append(token_id)
        new = self._decode([*self._settled, *self._held])[len(self._settled_text) :]
        if len(self._held) < MAX_HELD_TOKENS and (not new or new.endswith(REPLACEMENT)):
            return ""
        if new:  # else the held tokens have no text at all, and the window goes on without them
            self._settled, self._settled_text = self._held, self._decode(self._held)
        self._held = []
        return new

    def peek(self, token_id: int) -> str:
        """What `feed` would return; changes nothing."""
        state = self._settled, self._settled_text, list(self._held), self._is_behind_special
        text = self.feed(token_id)
        self._settled, self._settled_text, self._held, self._is_behind_special = state
        return text

    def flush(self) -> str:
        """The text of the held tokens."""
        new = self._decode([*self._settled, *self._held])[len(self._settled_text) :]
        self._held = []
        return new

    def _feed_bare(self, token_id: int) -> str:
        text = self.flush() + self._tokenizer.bytes_of(token_id).decode()
        self._settled, self._settled_text = [token_id], self._decode([token_id])
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
