"""`millstream serve`: check the command line, take the port, then run the server.

Nothing heavy is imported before the port is ours and the arguments are known to be good.
"""

import errno
import socket
import sys

from ..common.command_line import parse_args
from ..common.config import ServerArgs
from ..common.flags import ConfigError

BAD_COMMAND_LINE = 2


def main(argv: list[str]) -> int:
    """Serve until a signal or a failure ends it; returns the exit code (2 for what the user must change)."""
    try:
        args = parse_args(argv)
        listener = bind_port(args)
    except ConfigError as error:
        print(f"millstream: error: {error}", file=sys.stderr)
        return BAD_COMMAND_LINE
    from .server import serve  # noqa: PLC0415 - imports what --help must not wait for

    return serve(args, listener)


def bind_port(args: ServerArgs) -> socket.socket:
    """Take the port before anything is loaded; ConfigError naming it where that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {args.port} on {args.host} is taken; choose another with --port") from error
        raise ConfigError(f"cannot listen on {args.host} port {args.port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
