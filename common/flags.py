"""Command-line flags as data: a struct's fields, each declared once with its type, default, help and bounds."""

import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
MAX_INT, MAX_SECONDS = 2**31 - 1, 1e9  # of flags that declare no bound of their own


class Flag(msgspec.Struct, frozen=True):
    """What the command line says of a field. The value of a secret one is never shown."""

    group: str
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    words: dict[str, int] = {}
    is_secret: bool = False


def flag(
    group: str,
    text: str,
    *aliases: str,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    words: dict[str, int] | None = None,
    is_secret: bool = False,
) -> Flag:
    """Declare the flag of a field; `low` and `high` bound it inclusively, `words` stand for numbers."""
    return Flag(group, text, aliases, metavar, choices, low, high, words or {}, is_secret)


class ConfigError(ValueError):
    """A flag has a bad value; the message names it. The command ends with exit code 2."""


def flags(args_type: type[msgspec.Struct]) -> dict[str, tuple[type, Any, Flag]]:
    """Every field of a struct of flags: name -> (type, default, Flag); NODEFAULT is the default of a required one."""
    hints = get_type_hints(args_type, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(args_type)}
    found = {}
    for name, hint in hints.items():
        kind, declared = get_args(hint)
        found[name] = (_plain_type(kind), defaults[name], declared)
    return found


def flag_name(field: str) -> str:
    """`max_running_requests` -> `--max-running-requests`."""
    return "--" + field.replace("_", "-")


def field_of_flag(args_type: type[msgspec.Struct]) -> dict[str, str]:
    """Every flag and alias -> the field that it sets."""
    return {
        each: name
        for name, (_, _, declared) in flags(args_type).items()
        for each in (flag_name(name), *declared.aliases)
    }


def reader_of(kind: type, declared: Flag) -> Callable[[str], Any]:
    """What turns the text of a value into the value; ValueError for a wrong one.

    A tuple's items have commas between them. Where words stand for numbers, their numbers are not taken.
    """
    if kind is tuple:
        return lambda text: tuple(text.split(","))
    number_of = {int: _whole_number, float: _number}.get(kind, kind)
    if not declared.words:
        return number_of
    words = declared.words

    def read(text: str) -> Any:
        if text in words:
            return words[text]
        number = number_of(text)
        if number in words.values():
            raise ValueError(text)
        return number

    read.__name__ = f"{kind.__name__}, {' or '.join(words)}"  # argparse names it in its errors
    return read


def _whole_number(text: str) -> int:
    if not WHOLE_NUMBER.fullmatch(text):  # int() takes 3_5 and the digits of all scripts too
        raise ValueError(text)
    return int(text)


def _number(text: str) -> float:
    if not NUMBER.fullmatch(text):
        raise ValueError(text)
    return float(text)


_whole_number.__name__, _number.__name__ = "int", "float"  # argparse names them in its errors


def shown_value(declared: Flag, value: Any) -> Any:
    """A value as people shall see it: the word that stands for a number, nothing of a secret."""
    if declared.is_secret and value:
        return "(secret)"
    word = next((word for word, number in declared.words.items() if number == value), None)
    return value if word is None else word


def without_secrets(args: T) -> T:
    """The same, for processes that need no secrets."""
    secret = {name: default for name, (_, default, declared) in flags(type(args)).items() if declared.is_secret}
    return msgspec.structs.replace(args, **secret)


def check_ranges(args: msgspec.Struct) -> None:
    """Raise ConfigError naming the first flag that is out of its range or none of its choices."""
    for name, (_, default, declared) in flags(type(args)).items():
        value = getattr(args, name)
        if value is None or value == default:
            continue
        if declared.choices and value not in declared.choices:
            raise ConfigError(f"{flag_name(name)} must be one of {', '.join(declared.choices)}, not {value!r}")
        if declared.low is not None and not declared.low <= value <= _highest(declared, value):
            limit = f"at least {declared.low:g}"
            if declared.high is not None or value > declared.low:
                limit = f"from {declared.low:g} to {_highest(declared, value):.12g}"
            raise ConfigError(f"{flag_name(name)} must be {limit}, not {value}")


def _highest(declared: Flag, value: float) -> float:
    """The upper bound of a flag: where it declares none, what messages and kernels can carry."""
    if declared.high is not None:
        return declared.high
    return MAX_INT if isinstance(value, int) else MAX_SECONDS


def _plain_type(kind: Any) -> type:
    """`int | None` -> int, `tuple[str, ...]` -> tuple."""
    if get_origin(kind) is tuple:
        return tuple
    if get_origin(kind) is None:
        return kind  # type: ignore[no-any-return]
    plain: type = next(arg for arg in get_args(kind) if arg is not type(None))
    return plain
