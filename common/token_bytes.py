"""Bytes of single tokens, for tokenizers whose text is their tokens' bytes joined and read as UTF-8.

Two kinds are that simple: byte-level BPE (GPT-2's alphabet, one character a byte) and SentencePiece with byte fallback
(U+2581 is a space, `<0xE4>` is a byte). Joining bytes is exact in any split into steps, costs nothing per step but the
new tokens, and never needs to look back. Where bytes are no valid UTF-8, each maximal invalid part becomes one U+FFFD
(the Unicode standard's practice, and what byte-level BPE does); the `tokenizers` package instead replaces every byte of
a whole SentencePiece byte run as soon as one of them is invalid, which no stream could ever follow.
"""

import json
import re
from functools import lru_cache
from typing import Any

import tokenizers

SPACE_MARK = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class TokenBytes:
    """`token_bytes[id]` for one tokenizer; each id is looked up once."""

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space
        self._backend = backend
        self._convert = _byte_level_bytes if byte_level else _sentencepiece_bytes
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not know."""
        found = self._known.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            found = b"" if token is None else self._convert(token)
            self._known[token_id] = found
        return found


def find_token_bytes(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """The tokenizer's token bytes, or None where its decoder does more than join bytes."""
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return TokenBytes(backend, byte_level=True, strips_first_space=False)
    steps = decoder.get("decoders", [])
    if steps[:3] != [MARK_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}] or steps[3:] not in (
        [],
        [STRIP_ONE_SPACE],
    ):
        return None
    return TokenBytes(backend, byte_level=False, strips_first_space=len(steps) == 4)


@lru_cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode()
