"""The tokenizer of a model: text to ids and back, its special tokens and chat templates. Loads without torch.

Thread-safe, and encoding lets other threads run. Decoding is `decode_bytes` followed by UTF-8 wherever the tokenizer
allows it (`token_bytes`), so that a stream decoded token by token gives exactly the same text.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from .directory_tokenizer import read_directory_templates, read_directory_tokenizer
from .gguf_tokenizer import read_gguf_templates, read_gguf_tokenizer
from .literal_mark import drop_marks
from .token_bytes import find_token_bytes
from .tokenizer_parts import DEFAULT_TEMPLATE, ChatTemplates, TokenizerError, TokenizerParts

__all__ = ["ChatTemplates", "Tokenizer", "TokenizerError", "load_chat_templates", "load_tokenizer"]


def load_tokenizer(model_path: Path) -> "Tokenizer":
    """Load from a directory (tokenizer.json) or a .gguf file; ModelError says what is missing or wrong."""
    read = read_directory_tokenizer if model_path.is_dir() else read_gguf_tokenizer
    return Tokenizer(read(model_path))


def load_chat_templates(model_path: Path) -> ChatTemplates:
    """The templates alone, read where `load_tokenizer` reads them; ModelError if a file is broken."""
    return read_directory_templates(model_path) if model_path.is_dir() else read_gguf_templates(model_path)


class Tokenizer:
    """Text to ids and back.

    `special_tokens` maps roles to texts (`bos_token`, `eos_token` ...), `special_texts` the texts of all special tokens to
    their ids; `eos_token_ids` are all ids that end a turn.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        drop_marks(self._backend)
        self.special_tokens = dict(parts.special_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(parts.eos_token_ids))
        self.chat_templates = dict(parts.chat_templates)
        self.token_bytes = find_token_bytes(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self.special_texts = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_token_ids = frozenset(self.special_texts.values())
        self.vocab_size = 1 + max(max(self._backend.get_vocab().values(), default=-1), max(added, default=-1))
        self.bos_token_id = self.token_to_id(self.special_tokens.get("bos_token", ""))
        self.add_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, a Jinja text."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it count as such unless a MARK is in them. TokenizerError for a lone surrogate."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. (The backend lets go of the GIL only in its batch call.)"""
        _check_encodable(texts)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; ids that the tokenizer does not know give no text."""
        if self.token_bytes is None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        joined = self.decode_bytes(ids, skip_special_tokens)
        if self.token_bytes.strips_first_space:
            joined = joined.removeprefix(b" ")
        return joined.decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """The bytes of ids, joined (only where `token_bytes` exists; the first space is not stripped)."""
        assert self.token_bytes is not None
        skipped = self.special_token_ids if skip_special_tokens else ()
        return b"".join([self.token_bytes[token_id] for token_id in ids if token_id not in skipped])

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json holds it."""
        return self._backend.to_str()

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to a text, special tokens included; maybe a part of a character."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)


def _check_encodable(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text has a lone surrogate at position {error.start}") from None
