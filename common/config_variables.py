"""Settings from the environment: --max-running-requests is MILLSTREAM_MAX_RUNNING_REQUESTS."""

import re
from collections.abc import Mapping
from typing import Any

from .config import ServerArgs
from .did_you_mean import did_you_mean
from .flags import ConfigError, flags, reader_of

PREFIX = "MILLSTREAM_"
# What Kubernetes puts into every container for a service that is called millstream, or millstream-something.
KUBERNETES_NAME = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://\S*")
KEYS = frozenset({"api_key", "api_key_file", "admin_api_key"})
SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_variables(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Field -> value, and notices of variables that are none of ours; ConfigError naming one with a wrong value.

    An empty variable counts as unset, but for keys.
    """
    variables = {PREFIX + name.upper(): name for name in flags(ServerArgs)}
    values: dict[str, Any] = {}
    notices = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        if not text:
            if variables.get(variable) in KEYS:
                raise ConfigError(
                    f"{variable} is empty, and would leave the server without this key; unset it if that is meant"
                )
            continue
        if KUBERNETES_VALUE.fullmatch(text):
            if variable in variables:
                notices.append(f"{variable}={text} is of a Kubernetes service of that name, and not taken as a setting")
        elif variable in variables:
            values[variables[variable]] = _read(variable, variables[variable], text)
        elif not KUBERNETES_NAME.fullmatch(variable):
            hint = did_you_mean(
                variable.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in variables], PREFIX
            )
            notices.append(f"{variable} is no setting{hint}")
    return values, notices


def _read(variable: str, name: str, text: str) -> Any:
    kind, _, declared = flags(ServerArgs)[name]
    if not text.isprintable():  # bytes that are no UTF-8 are none, too
        raise ConfigError(f"{variable} must be printable text")
    if kind is bool:
        if text.lower() not in SWITCHES:
            raise ConfigError(f"{variable} must be one of {', '.join(SWITCHES)}, not {text!r}")
        return SWITCHES[text.lower()]
    try:
        return reader_of(kind, declared)(text)
    except ValueError:
        what = {int: "a whole number", float: "a number"}[kind]
        words = f" or {' or '.join(declared.words)}" if declared.words else ""
        raise ConfigError(f"{variable} must be {what}{words}, not {text!r}") from None
