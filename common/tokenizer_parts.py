"""What every kind of model file must yield for a tokenizer: the parts, whichever file they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

DEFAULT_TEMPLATE = "default"


class TokenizerError(ValueError):
    """A text cannot be encoded, or an id is not in the vocabulary; one clear line for the client."""


@dataclass(frozen=True)
class TokenizerParts:
    """A `tokenizers` backend and what surrounds it.

    `special_tokens` maps roles to texts as chat templates read them (`bos_token`, `eos_token` ...).
    `chat_templates` maps names to Jinja texts; the one that matters is `default`.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    eos_token_ids: Sequence[int]
    chat_templates: Mapping[str, str]


@dataclass(frozen=True)
class ChatTemplates:
    """How a model's chats are written and read: Jinja texts by name, and transformers' response template or None."""

    chat_templates: Mapping[str, str]
    response_template: Mapping[str, Any] | None = None
