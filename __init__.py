"""millstream: a multi-process server for large language models. `Engine` is the same without HTTP."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tokenizer_manager.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    """Import Engine when it is first asked for: the command line and the children do without."""
    if name == "Engine":
        return importlib.import_module(".tokenizer_manager.engine", __name__).Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
