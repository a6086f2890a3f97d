"""Settings from a TOML file: keys are the flags' names without their dashes in front."""

import tomllib
from pathlib import Path
from typing import Any

from .config import ServerArgs
from .did_you_mean import did_you_mean
from .flags import ConfigError, field_of_flag, flags

MAX_BYTES = 1 << 20
NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def read_config_file(file: str) -> dict[str, Any]:
    """Field -> value; ConfigError naming the file, and the key that is unknown or has a wrong value."""
    names = field_of_flag(ServerArgs)
    values: dict[str, Any] = {}
    for key, value in _read(file).items():
        name = names.get("--" + key.replace("_", "-"))
        if name == "config":
            raise ConfigError(f"{file}: {key} is a flag alone: one file names no other")
        if name is None:
            raise ConfigError(f"{file}: unknown key {key}{_hint(key, names)}")
        if name in values:
            raise ConfigError(f"{file}: {key} is given twice, under two names")
        values[name] = typed_value(f"{file}: {key}", name, value)
    return values


def typed_value(at: str, field: str, value: Any) -> Any:
    """The value as ServerArgs has it, from its own type or the word that stands for a number; ConfigError naming `at`."""
    kind, _, declared = flags(ServerArgs)[field]
    if isinstance(value, str) and value in declared.words:
        return declared.words[value]
    if kind is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ConfigError(f"{at} must be a list of strings")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (declared.words and value in declared.words.values()):
        words = f" or {' or '.join(map(repr, declared.words))}" if declared.words else ""
        raise ConfigError(f"{at} must be {NAMES[kind]}{words}, not {value!r}")
    return value


def _read(file: str) -> dict[str, Any]:
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"--config {file}: more than {MAX_BYTES} bytes")
    try:
        return tomllib.loads(text.decode("utf-8-sig"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file}: not TOML: {error}") from error


def _hint(key: str, names: dict[str, str]) -> str:
    return did_you_mean(key.replace("_", "-"), [name.removeprefix("--") for name in names])
