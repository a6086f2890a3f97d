"""Messages as JSON that people can read: every struct is an object with its field names, every column a list of numbers.

`to_plain` leaves out fields that have their default, and empty ones. A union's member says its `type`. `Int32s` columns,
the only bytes in the protocol, are lists of integers; "7*256" is 256 times the same.
"""

import math
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from ...common.messages import pack_int32, unpack_int32

MIN_REPEATS = 4  # of one number, to be written as "7*256"
MAX_REPEATS = 2**24
EMPTY: dict[Any, Any] = {bytes: b"", list: [], dict: {}}
NOT_FINITE = ("nan", "inf", "-inf")  # which JSON has no numbers for


class PlainError(ValueError):
    """JSON that is not of the message's type; the message says where."""


def to_plain(value: Any) -> Any:
    """A message, or anything in one, as dicts, lists, strings, numbers and None."""
    if isinstance(value, msgspec.Struct):
        tag, defaults = _struct_layout(type(value))
        plain: dict[str, Any] = {"type": tag} if tag else {}
        for name, default in defaults.items():
            item = getattr(value, name)
            if item != default:
                plain[name] = to_plain(item)
        return plain
    if isinstance(value, bytes):
        return _column(unpack_int32(value))
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value] if value and isinstance(value[0], msgspec.Struct) else value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, plain: Any, where: str = "") -> Any:
    """Inverse of `to_plain` for a value of type `kind` (a Struct, a union of them, or a field's type); PlainError."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:
        return _member_from_plain(members, plain, where)
    if kind is bytes:
        return _bytes_from_plain(plain, where)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct_from_plain(kind, plain, where)
    if origin is list and isinstance(members[0], type) and issubclass(members[0], msgspec.Struct):
        if not isinstance(plain, list):
            raise PlainError(f"{where}: expected a list")
        return [from_plain(members[0], item, f"{where}[{index}]") for index, item in enumerate(plain)]
    if origin is dict and isinstance(members[1], type) and issubclass(members[1], (bytes, msgspec.Struct)):
        return _dict_from_plain(members, plain, where)
    try:
        if kind is float and plain in NOT_FINITE:
            return float(plain)
        return msgspec.convert(plain, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise PlainError(f"{where}: {error}") from None


def _dict_from_plain(members: tuple[Any, ...], plain: Any, where: str) -> dict[Any, Any]:
    if not isinstance(plain, dict):
        raise PlainError(f"{where}: expected an object")
    key_type, value_type = members
    try:
        keys = [msgspec.convert(key, key_type, strict=False) for key in plain]
    except msgspec.ValidationError as error:
        raise PlainError(f"{where}: {error}") from None
    items = [from_plain(value_type, item, f"{where}.{key}") for key, item in plain.items()]
    return dict(zip(keys, items, strict=True))


@cache
def _struct_layout(kind: type[msgspec.Struct]) -> tuple[str | None, dict[str, Any]]:
    tag = kind.__struct_config__.tag
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    for name, hint in _field_types(kind).items():
        empty = EMPTY.get(get_origin(hint) or hint)
        if empty is not None and defaults[name] is msgspec.NODEFAULT:
            defaults[name] = empty
    return (str(tag) if tag else None), defaults


@cache
def _field_types(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _struct_from_plain(kind: type[msgspec.Struct], plain: Any, where: str) -> msgspec.Struct:
    tag, defaults = _struct_layout(kind)
    if not isinstance(plain, dict):
        raise PlainError(f"{where or kind.__name__}: expected an object")
    values = dict(plain)
    if tag and values.pop("type", None) != tag:
        raise PlainError(f"{where or kind.__name__}: expected the type {tag}, not {plain.get('type')!r}")
    for name in values.keys() - defaults.keys():
        raise PlainError(f"{where or kind.__name__} has no field {name!r}")
    types, prefix, members = _field_types(kind), where or kind.__name__, dict(defaults)
    members.update({name: from_plain(types[name], item, f"{prefix}.{name}") for name, item in values.items()})
    for name, member in members.items():
        if member is msgspec.NODEFAULT:
            raise PlainError(f"{prefix} lacks the field {name!r}")
    return kind(**members)


def _member_from_plain(members: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain is None and type(None) in members:
        return None
    structs = [each for each in members if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    if structs:
        tag = plain.get("type") if isinstance(plain, dict) else None
        chosen = [each for each in structs if _struct_layout(each)[0] == tag]
        if not chosen:
            raise PlainError(f"{where or 'message'}: unknown type {tag!r}")
        return from_plain(chosen[0], plain, where)
    (kind,) = (each for each in members if each is not type(None))
    return from_plain(kind, plain, where)


def _column(values: list[int]) -> list[int] | str:
    if len(values) >= MIN_REPEATS and values.count(values[0]) == len(values):
        return f"{values[0]}*{len(values)}"
    return values


def _bytes_from_plain(plain: Any, where: str) -> bytes:
    if isinstance(plain, str):
        value, _, count = plain.partition("*")
        try:
            repeats = int(count)
            if 0 <= repeats <= MAX_REPEATS:
                return pack_int32([int(value)]) * repeats
        except (ValueError, OverflowError):
            pass
        raise PlainError(f"{where}: {plain[:40]!r} is not of the form 7*256")
    try:
        return pack_int32(plain)
    except (TypeError, OverflowError):
        raise PlainError(f"{where}: expected a list of 32-bit integers") from None
