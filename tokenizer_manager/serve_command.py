"""`millstream serve`: read the settings, take the port, then run the server.

Nothing heavy is imported before the port is ours and the settings are known to be good.
"""

import sys

from ..common.config import process_environment
from ..common.flags import ConfigError
from ..common.settings import read_settings
from .port import bind_port

BAD_COMMAND_LINE = 2


def main(argv: list[str]) -> int:
    """Serve until a signal or a failure ends it; returns the exit code (2 for what the user must change)."""
    try:
        settings = read_settings(argv, process_environment())
        listener = bind_port(settings.args.host, settings.args.port)
    except ConfigError as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return BAD_COMMAND_LINE
    for notice in settings.notices:
        print(f"note: {notice}", file=sys.stderr)
    from .server import serve  # noqa: PLC0415 - imports what --help must not wait for

    return serve(settings, listener)
