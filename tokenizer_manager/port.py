"""The port that a server listens on: taken before anything is loaded, with advice where it can't be."""

import contextlib
import errno
import socket
from pathlib import Path

from ..common.flags import ConfigError

LISTENING = "0A"  # the state in /proc/net/tcp
NEARBY = 100


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket, port 0 takes a free one; ConfigError naming the port and who holds it."""
    try:
        listener = _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken{_holder(port)}; {_advice(host, port)}") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _advice(host: str, port: int) -> str:
    for other in range(port + 1, min(port + NEARBY, 65536)):
        with contextlib.suppress(OSError), _listen(host, other):
            return f"--port {other} is free"
    return "choose another with --port, or 0 for any"


def _holder(port: int) -> str:
    """` by process 1234 (python)`, as far as this user may know."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in inodes for fd in _file_descriptors(process)):
                return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _file_descriptors(process: Path) -> list[Path]:
    return list((process / "fd").iterdir())


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return inodes
