"""millstream: a multi-process server for large language models. `Engine` is the same without HTTP, `APIError` what it raises."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tokenizer_manager.api_error import APIError
    from .tokenizer_manager.engine import Engine

__version__ = "0.1.0"
__all__ = ["APIError", "Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import these when they are first asked for: the command line and the children do without."""
    if name == "Engine":
        return importlib.import_module(".tokenizer_manager.engine", __name__).Engine
    if name == "APIError":
        return importlib.import_module(".tokenizer_manager.api_error", __name__).APIError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
