"""The command line of `millstream serve`, made from the fields of ServerArgs."""

import argparse
from typing import Any, NoReturn

import msgspec

from .config import ServerArgs
from .did_you_mean import did_you_mean
from .flags import ConfigError, Flag, flag_name, flags, reader_of

GROUP_TITLES = {
    "model": "model",
    "serving": "serving",
    "access": "access",
    "scheduling": "scheduling",
    "memory": "KV cache and memory",
    "devices": "devices and parallelism",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, and suggests the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Raise in place of printing and exiting."""
        raise ConfigError(message)

    def parse_known_flags(self, argv: list[str]) -> argparse.Namespace:
        """Parse, or raise ConfigError naming the unknown argument and its nearest relative."""
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            name = unknown[0].split("=")[0]
            hint = did_you_mean(name, self._option_string_actions) or "; see --help"
            raise ConfigError(f"unknown argument {name}{hint}")
        return namespace


def make_parser() -> Parser:
    """The parser of `millstream serve`: one group of flags for each part of the server."""
    parser = Parser(
        prog="millstream serve",
        usage="millstream serve [MODEL] [flags]",
        description="Serve a model over HTTP with an OpenAI-compatible API.",
        epilog="Settings also come from MILLSTREAM_* variables (MILLSTREAM_PORT=8000) and from a TOML file (--config); flags "
        "go first. --no-X undoes a switch X. vLLM's flags are understood too.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model-path")
    groups = {name: parser.add_argument_group(title) for name, title in GROUP_TITLES.items()}
    add_flags(groups, flags(ServerArgs))
    return parser


def parse_flags(argv: list[str]) -> dict[str, Any]:
    """The fields that a command line sets; ConfigError names the flag. Prints and exits on --help."""
    values = vars(make_parser().parse_known_flags(argv))
    positional = values.pop("model", None)
    if positional is not None and values.setdefault("model_path", positional) != positional:
        raise ConfigError(f"MODEL is given twice: {positional} and --model-path {values['model_path']}")
    return values


def add_flags(groups: dict[str, Any], declared_flags: dict[str, tuple[type, Any, Flag]]) -> None:
    """Add each flag, with its aliases, to the argument group that it names; `--no-X` undoes a switch X."""
    for name, (kind, default, declared) in declared_flags.items():
        names = [flag_name(name), *declared.aliases]
        groups[declared.group].add_argument(*names, dest=name, **_argument(kind, default, declared))
        if kind is bool:
            no = flag_name(f"no_{name}")
            groups[declared.group].add_argument(no, dest=name, action="store_false", help=argparse.SUPPRESS)


class _Extend(argparse.Action):
    """A flag that may come several times, each time with some items."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


def _argument(kind: type, default: Any, declared: Flag) -> dict[str, Any]:
    text = declared.help.replace("%", "%%")
    if kind is bool:
        return {"action": "store_true", "help": text}
    if default not in (None, (), msgspec.NODEFAULT) and "default" not in text:
        text += f" (default: {default})"
    argument: dict[str, Any] = {"type": reader_of(kind, declared), "help": text}
    if kind is tuple:
        argument["action"] = _Extend
    if declared.choices:
        argument["choices"] = declared.choices
    else:
        argument["metavar"] = declared.metavar or kind.__name__.upper()
    return argument
