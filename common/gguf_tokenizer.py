"""The tokenizer of a GGUF file: a `tokenizers` BPE built from the metadata's arrays.

Two kinds of vocabulary, by `tokenizer.ggml.model`: "gpt2" is byte-level BPE with the file's merges; "llama" is
SentencePiece BPE with byte fallback, whose merges follow from the scores of its tokens (Gemma's from their order).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .gguf_file import GGUFFile
from .gguf_pre_tokenizers import ADD_BOS, IGNORE_MERGES, make_pre_tokenizer
from .model_error import ModelError
from .token_bytes import SPACE_MARK, byte_alphabet
from .tokenizer_parts import DEFAULT_TEMPLATE, ChatTemplates, TokenizerParts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
NOT_MADE = frozenset({UNKNOWN, CONTROL, BYTE})  # by merging
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn or a text even where the file names only one of them (llama.cpp's list).
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<end_of_turn>", "<EOT>"}
)


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """The parts of a GGUF file's tokenizer; ModelError if they are missing, inconsistent or of an unknown kind."""
    return gguf_tokenizer_parts(GGUFFile(path).metadata)


def read_gguf_templates(path: Path) -> ChatTemplates:
    """The chat templates of a GGUF file alone."""
    return ChatTemplates(_chat_templates(GGUFFile(path).metadata))


def gguf_tokenizer_parts(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The parts from metadata alone."""
    tokens = _column(metadata, "tokens", str)
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens is missing")
    types = _column(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    ids = {role: _token_id(metadata, key, len(tokens)) for role, key in ROLES.items()}
    special_tokens = {role: tokens[token_id] for role, token_id in ids.items() if token_id is not None}
    backend = _byte_level(metadata, tokens, types) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    _add_tokens(backend, tokens, types, special_tokens)
    _add_bos_and_eos(backend, metadata, ids, special_tokens, kind)
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_end_token_ids(metadata, tokens, types),
        chat_templates=_chat_templates(metadata),
    )


def _column(metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    """An array of the tokenizer, empty where the file has none; ModelError for a wrong type or length."""
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
        raise ModelError(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
    if values and length is not None and len(values) != length:
        raise ModelError(f"tokenizer.ggml.{name} has {len(values)} values for {length} tokens")
    return values


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ModelError(f"tokenizer.ggml.{key} is {token_id!r}, which is not in the vocabulary of {vocab_size}")
    return token_id


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"tokenizer.ggml.tokens and merges do not fit: {error}") from error


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Byte-level BPE. Tokens that are written plainly where the byte alphabet is due are respelled in it."""
    alphabet = set(byte_alphabet())
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    vocab = {
        token
        if kind in (CONTROL, USER_DEFINED) or alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode()): token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
    }
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    backend = _bpe(vocab, _merges(metadata), ignore_merges=name in IGNORE_MERGES)
    backend.pre_tokenizer = make_pre_tokenizer(name)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece BPE: unknown characters fall back to byte tokens, spaces are U+2581; no text makes a control token."""
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if gemma:  # its runs of spaces are written plainly
        tokens = [SPACE_MARK * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    scores = [-i for i in range(len(tokens))] if gemma else _column(metadata, "scores", float, len(tokens))
    made = {token: score for token, score, kind in zip(tokens, scores, types, strict=False) if kind not in NOT_MADE}
    merges = _merges(metadata) or _merges_by_score(vocab, made)
    unknown_id = _token_id(metadata, "unknown_token_id", len(tokens))
    unknown = {} if unknown_id is None else {"unk_token": tokens[unknown_id]}
    backend = _bpe(vocab, merges, fuse_unk=True, byte_fallback=True, **unknown)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        adds_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
        scheme = "first" if adds_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
        steps += [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in _column(metadata, "merges", str)]
    for pair in pairs:
        if len(pair) != 2:
            raise ModelError(f"tokenizer.ggml.merges: {' '.join(pair)!r} is not two tokens")
    return pairs


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: the order in which SentencePiece would merge."""
    found = []
    for token, score in scores.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(
    backend: Tokenizer, tokens: Sequence[str], types: Sequence[int], special_tokens: Mapping[str, str]
) -> None:
    """Control tokens are special; user-defined tokens are found whole in the text, but are text."""
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    special = dict.fromkeys([*control, *special_tokens.values()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    known = [token for token in user_defined if token not in special and backend.token_to_id(token) is not None]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in known])


def _add_bos_and_eos(
    backend: Tokenizer,
    metadata: Mapping[str, Any],
    ids: Mapping[str, int | None],
    special_tokens: Mapping[str, str],
    kind: str,
) -> None:
    """Texts begin with BOS or end with EOS where the file says so (SentencePiece: BOS unless it says no)."""
    add_bos = metadata.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    )
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = ["bos_token"] if add_bos and ids["bos_token"] is not None else []
    eos = ["eos_token"] if add_eos and ids["eos_token"] is not None else []
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(special_tokens[role] for role in bos), "$A", *(special_tokens[role] for role in eos)],
            special_tokens=[(special_tokens[role], ids[role]) for role in (*bos, *eos)],
        )


def _end_token_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    named = [_token_id(metadata, key, len(tokens)) for key in END_KEYS]
    listed = [i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_TEXTS]
    return [token_id for token_id in dict.fromkeys([*named, *listed]) if token_id is not None]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): key for key in metadata if key.startswith(prefix + ".")}
    keys = {DEFAULT_TEMPLATE: prefix, **named}
    return {name: metadata[key] for name, key in keys.items() if isinstance(metadata.get(key), str)}
