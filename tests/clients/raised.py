"""For the scripts of this folder, which run without pytest."""

from collections.abc import Callable
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)


def raised(kind: type[E], call: Callable[..., Any], **arguments: Any) -> E:
    """The exception of this kind that a call raises; AssertionError if it raises none."""
    try:
        call(**arguments)
    except kind as error:
        return error
    raise AssertionError(kind)
