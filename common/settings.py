"""Where settings come from: flags go before MILLSTREAM_* variables, these before a TOML file, and all before defaults."""

from collections.abc import Mapping
from typing import Any

import msgspec

from .command_line import parse_flags
from .config import ServerArgs
from .config_checks import check_args
from .config_file import read_config_file
from .config_variables import read_variables
from .flags import ConfigError, flag_name, flags, shown_value
from .vllm_flags import translate_vllm_flags

FLAG, ENVIRONMENT = "flags", "environment"


class Settings(msgspec.Struct, frozen=True):
    """The checked arguments; where the value of each field that is set comes from; what the user should know of it."""

    args: ServerArgs
    origins: dict[str, str] = {}  # field -> "flags", "environment", or the name of the file
    notices: tuple[str, ...] = ()

    def lines(self) -> dict[str, str]:
        """Lines of the start-up plan: every value that was set, under its origin."""
        shown = shown_args(self.args)
        by_origin: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            by_origin.setdefault(f"set by {origin}", []).append(_as_flag(name, shown[name]))
        return {origin: " ".join(values) for origin, values in by_origin.items()}


def read_settings(argv: list[str], environment: Mapping[str, str]) -> Settings:
    """Read, merge and check all sources; ConfigError names what is wrong, and where. Prints and exits on --help."""
    argv, notices = translate_vllm_flags(argv)
    by_flags = parse_flags(argv)
    by_variables, more_notices = read_variables(environment)
    file = by_flags.get("config", by_variables.get("config"))
    by_file = read_config_file(file) if file is not None else {}
    values = by_file | by_variables | by_flags
    if "model_path" not in values:
        raise ConfigError("no model is given: millstream serve MODEL (try: millstream serve smollm2)")
    origins = (
        dict.fromkeys(by_file, str(file)) | dict.fromkeys(by_variables, ENVIRONMENT) | dict.fromkeys(by_flags, FLAG)
    )
    return Settings(_checked(values, origins), origins, (*notices, *more_notices))


def shown_args(args: ServerArgs) -> dict[str, Any]:
    """All values as people shall see them: words for the numbers that stand for words, no secrets."""
    shown = {name: shown_value(declared, getattr(args, name)) for name, (_, _, declared) in flags(ServerArgs).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def _checked(values: dict[str, Any], origins: dict[str, str]) -> ServerArgs:
    """The arguments; a ConfigError of a value that is not a flag's says where it stands."""
    try:
        return check_args(ServerArgs(**values))
    except ConfigError as error:
        named = str(error).split()[0]
        origin = next((origin for name, origin in origins.items() if flag_name(name) == named), FLAG)
        if origin == FLAG:
            raise
        raise ConfigError(f"{error} (set by {origin})") from error


def _as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_name(name) if value else flag_name(f"no_{name}")
    return f"{flag_name(name)} {','.join(value) if isinstance(value, list) else value}"
