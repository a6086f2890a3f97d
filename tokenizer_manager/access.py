"""Who may call which route: keys, and what a browser must not be talked into.

Every route declares its level. Keys are compared as digests, each call with all of them, so that the time of a refusal
tells nothing of a key. A user key is a tenant: prefixes in the KV cache are shared within one and never between two.
"""

import enum
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from ..common.config import ServerArgs
from ..common.flags import ConfigError
from .api_error import forbidden, http_error, unauthorized

HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
ADMIN_KEY_REQUIRED = "admin_key_required"
KEY = re.compile(r"[!-~]{1,512}")
BEARER = re.compile(r"bearer +", re.IGNORECASE)

Headers = CIMultiDictProxy[str]


class Level(enum.Enum):
    """Whom a route is for."""

    PUBLIC = "public"  # probes, metrics, pages: no key
    USER = "user"  # a user key or the admin key, where user keys are set
    ADMIN = "admin"  # what touches all users: the admin key, where any key is set


class Caller(msgspec.Struct, frozen=True):
    """Who calls. `tenant` is secret to clients, and None where there are no user keys."""

    is_admin: bool = False
    tenant: str | None = None

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt of a request, which no other tenant can have."""
        return cache_salt if self.tenant is None else f"{self.tenant} {cache_salt or ''}"


class Access:
    """The keys and names that a server was started with.

    `bound_to` is the address that it listens on: on a loopback address the Host header must name this machine, so that
    a web page can not reach the server under a name of its own (DNS rebinding).
    """

    def __init__(
        self,
        *,
        api_keys: Iterable[str] = (),
        admin_api_key: str | None = None,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        bound_to: str | None = None,
    ) -> None:
        self._secret = secrets.token_bytes(32)  # of this boot, as the cache is
        self._users = [self._digest("key", key) for key in api_keys]
        self._admin = [self._digest("key", admin_api_key)] if admin_api_key else []
        self._hosts = {host.lower() for host in allowed_hosts}
        self._checks_host = bool(self._hosts) or (bound_to is not None and _is_loopback(bound_to))
        self._origins = {origin.lower().rstrip("/") for origin in allowed_origins}

    @property
    def summary(self) -> str:
        """For the start-up plan."""
        if not (self._users or self._admin):
            return "none: whoever reaches the port may use every route (--api-key, --admin-api-key)"
        users = f"{len(self._users)} of users" if self._users else "none of users: their routes are open"
        return f"{users}; {'one' if self._admin else 'none'} of an admin" + (
            "" if self._admin else ": admin routes closed"
        )

    def allows_origin(self, origin: str) -> bool:
        """Whether the pages of this other site may use the server from a browser."""
        return bool(origin) and ("*" in self._origins or origin.lower() in self._origins)

    def check_source(self, request: web.BaseRequest) -> None:
        """APIError 400 or 403 for a request that names no host, a strange one, or comes from another site's page."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise http_error(400, close=True)
        host = hosts[0] if hosts else "localhost"
        if self._checks_host and not self._is_known_host(host):
            message = "This server does not answer to the name in the Host header (--allowed-hosts adds names)."
            raise forbidden(message, "host_not_allowed")
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_known_origin(origin.lower(), host.lower()):
            message = "Pages of other sites may not use this server (--allowed-origins lets one)."
            raise forbidden(message, "origin_not_allowed")

    def check_key(self, level: Level, headers: Headers) -> Caller:
        """Who calls a route of this level; APIError 401 without a key that is valid there, 403 with too weak a one."""
        if not (self._users or self._admin):
            return Caller(is_admin=True)
        if level is Level.PUBLIC:
            return Caller()
        key = _key_of(headers)
        is_user, is_admin = self._is_one_of(self._users, key), self._is_one_of(self._admin, key)
        needs_key = level is Level.ADMIN or bool(self._users)
        if needs_key and not (is_user or is_admin):
            raise unauthorized()
        if level is Level.ADMIN and not is_admin:
            raise forbidden("This route needs the key that the server got with --admin-api-key.", ADMIN_KEY_REQUIRED)
        tenant = self._digest("tenant", key).hex() if key and self._users else None
        return Caller(is_admin, tenant)

    def _is_one_of(self, digests: list[bytes], key: str | None) -> bool:
        """Compares with all of them, also where there is no key."""
        given = self._digest("key", key or "")
        found = [hmac.compare_digest(given, digest) for digest in digests]
        return key is not None and any(found)

    def _digest(self, purpose: str, key: str) -> bytes:
        return hmac.digest(self._secret, f"{purpose} {key}".encode(), hashlib.sha256)

    def _is_known_host(self, host: str) -> bool:
        found = HOST.fullmatch(host)
        name = found[1].lower().rstrip(".") if found else ""
        return bool(name) and (name in self._hosts or host.lower() in self._hosts or _is_loopback(name.strip("[]")))

    def _is_known_origin(self, origin: str, host: str) -> bool:
        return self.allows_origin(origin) or origin.partition("://")[2] == host


def _key_of(headers: Headers) -> str | None:
    """The one key of a call, in OpenAI's header or in Anthropic's; none where a header stands twice or is malformed."""
    bearers, keys = headers.getall("Authorization", []), headers.getall("x-api-key", [])
    if len(bearers) > 1 or len(keys) > 1:
        return None
    if bearers:
        scheme = BEARER.match(bearers[0])
        keys = [bearers[0][scheme.end() :]] if scheme else []
    return keys[0] if keys and KEY.fullmatch(keys[0]) else None


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def load_access(args: ServerArgs, bound_to: str) -> Access:
    """What the flags say; ConfigError for a key that no header could carry, or a file that can not be read."""
    keys = [("--api-key", key) for key in args.api_key]
    if args.api_key_file is not None:
        keys += [("--api-key-file", key) for key in _read_keys(args.api_key_file)]
    admin = [("--admin-api-key", args.admin_api_key)] if args.admin_api_key is not None else []
    for flag, key in keys + admin:
        if not KEY.fullmatch(key):
            raise ConfigError(f"{flag}: a key is 1 to 512 printable ASCII characters without spaces")
    if args.admin_api_key in args.api_key:
        raise ConfigError("--admin-api-key must differ from every --api-key")
    return Access(
        api_keys=[key for _, key in keys],
        admin_api_key=args.admin_api_key,
        allowed_hosts=args.allowed_hosts,
        allowed_origins=args.allowed_origins,
        bound_to=bound_to,
    )


def _read_keys(path: str) -> list[str]:
    """At least one key, or ConfigError: a file that is empty by mistake must not open the server."""
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} can not be read: {getattr(error, 'strerror', 'no text')}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key")
    return keys
