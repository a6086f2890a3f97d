"""JSON objects that may have been cut off: what is whole of them."""

import re
from typing import Any

import msgspec

TOKEN = re.compile(r'[ \t\r\n]*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s,:{}\[\]"]+)', re.DOTALL)
CLOSERS = {"{": "}", "[": "]"}


def parse_object(text: str) -> dict[str, Any]:
    """The object that a text is, or begins to be: members and items that are not whole are left out."""
    value = _decode(text)
    if value is None:
        value = _decode(_closed(text))
    return value if isinstance(value, dict) else {}


def _closed(text: str) -> str:
    """The text up to its last whole value, and the brackets that are open there."""
    closers: list[str] = []
    before, position, kept = "", 0, 0
    while match := TOKEN.match(text, position):
        token, position = match[1], match.end()
        is_key = closers[-1:] == ["}"] and before in {"{", ","}
        if token in CLOSERS:
            closers.append(CLOSERS[token])
        elif token in closers[-1:]:
            closers.pop()
        elif token in {",", ":"} or is_key or (position == len(text) and not _is_whole(token)):
            before = token
            continue
        before, kept = token, position
    return text[:kept] + "".join(reversed(closers))


def _is_whole(word: str) -> bool:
    return word[0] == '"' or word == "null" or _decode(word) is not None


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
