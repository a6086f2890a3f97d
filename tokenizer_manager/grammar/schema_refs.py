"""Local references of JSON Schemas: the places that they stand for."""

from typing import Any
from urllib.parse import unquote

MAX_INDEX_DIGITS = 6


def escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(part: str) -> str:
    """The key that a part of a JSON pointer stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def find_target(root: Any, reference: str) -> tuple[str, Any] | None:
    """What "#" or "#/..." stands for, under its JSON pointer; None for another reference, or where there is nothing.

    The root's own $id may stand ahead of it.
    """
    own_id = root.get("$id") if isinstance(root, dict) else None
    if isinstance(own_id, str) and own_id:
        reference = "#" if reference == own_id else reference.removeprefix(own_id.removesuffix("#"))
    if reference == "#":
        return "#", root
    if not reference.startswith("#/") or "%2f" in reference.lower():
        return None
    pointer, found = "#", root
    for part in unquote(reference[2:]).split("/"):
        key = unescape(part)
        if isinstance(found, list) and key.isascii() and key.isdigit() and len(key) <= MAX_INDEX_DIGITS:
            found = dict(enumerate(found)).get(int(key))
        elif isinstance(found, dict) and not (found is not root and has_own_base(found, root)):
            found = found.get(key)
        else:
            return None
        pointer += f"/{escape(key)}"
    return None if found is None else (pointer, found)


def has_own_base(schema: dict[str, Any], root: Any) -> bool:
    """Whether references in this schema begin somewhere else than at the root."""
    is_old = isinstance(root, dict) and "draft-04" in str(root.get("$schema"))
    return isinstance(schema.get("$id"), str) or (is_old and isinstance(schema.get("id"), str))
