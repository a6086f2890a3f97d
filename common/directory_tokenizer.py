"""The tokenizer of a model directory: tokenizer.json and the small JSON files beside it.

tokenizer.json is taken as its authors wrote it (model, normalizer, pre-tokenizer, post-processor, decoder);
tokenizer_config.json adds special tokens and the chat template; generation_config.json and config.json the ids that end
a turn. Chat templates in files of their own (chat_template.jinja, chat_template.json, additional_chat_templates/) win
over those in tokenizer_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from .model_error import ModelError
from .tokenizer_parts import DEFAULT_TEMPLATE, ChatTemplates, TokenizerParts

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_directory_tokenizer(directory: Path) -> TokenizerParts:
    """The parts of a directory's tokenizer; ModelError if a file is missing or broken."""
    backend = _read_backend(directory / "tokenizer.json")
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = {role: text for role in SPECIAL_ROLES if (text := _token_text(config.get(role)))}
    _add_special_tokens(backend, config, special_tokens)
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_find_eos_token_ids(directory, backend, special_tokens),
        chat_templates=_find_chat_templates(directory, config),
    )


def read_directory_templates(directory: Path) -> ChatTemplates:
    """The chat templates of a directory alone; ModelError if a file is broken."""
    config = _read_json(directory / "tokenizer_config.json")
    response = config.get("response_template")
    return ChatTemplates(_find_chat_templates(directory, config), response if isinstance(response, dict) else None)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no tokenizer.json (save the tokenizer with transformers to get one)")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error


def _token_text(value: Any) -> str | None:
    """A special token is written as a text or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _add_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Make special what only tokenizer_config.json calls so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    listed = [_token_text(value) for value in (extra.values() if isinstance(extra, dict) else extra)]
    missing = [text for text in [*special_tokens.values(), *listed] if text and text not in known]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _find_eos_token_ids(directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> list[int]:
    eos_token_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    found = [] if eos_token_id is None else [eos_token_id]
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(directory / name).get("eos_token_id")
        ids = listed if isinstance(listed, list) else [listed]
        found += [token_id for token_id in ids if type(token_id) is int and token_id >= 0]
    return found


def _find_chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    main_file = directory / "chat_template.jinja"
    if main_file.is_file():
        files[DEFAULT_TEMPLATE] = main_file
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    return _named_templates(_read_json(directory / "chat_template.json").get("chat_template")) or _named_templates(
        config.get("chat_template")
    )


def _named_templates(value: Any) -> dict[str, str]:
    """A chat template is written as a text, or as a list of objects with `name` and `template`."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from error
