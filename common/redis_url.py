"""The forms of ``--redis``: one server, a master that sentinels watch, a cluster. Plain data; opens nothing.

    redis://[user[:password]@]host[:6379][/db]
    redis+sentinel://[user[:password]@]sentinel[:26379],sentinel,.../service[/db]
    redis+cluster://[user[:password]@]node[:6379],node,...

``rediss``, ``rediss+sentinel`` and ``rediss+cluster`` are the same over TLS. Options follow a ``?``; see ``OPTIONS``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from common.address import host_port

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# As redis-py names them; the second row is of Sentinel alone, whose servers have users of their own.
OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
SENTINEL_OPTIONS = ("sentinel_user", "sentinel_password_file")


class RedisUrlError(ValueError):
    """A URL that cannot be used. The message never has a password in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A URL, read."""

    kind: str  # single, sentinel or cluster
    is_tls: bool
    nodes: tuple[tuple[str, int], ...]  # the server; sentinels; some of a cluster
    service: str = ""  # under which sentinels know the master
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """For people."""
        nodes = ", ".join(host_port(*node) for node in self.nodes)
        return f"{self.service} of {nodes}" if self.service else nodes

    def check_password_file(self, path: Path | None) -> None:
        """Raises ``RedisUrlError`` when both the URL and a file give a password, or that cannot be read."""
        if path is None:
            return
        if self.password is not None:
            raise RedisUrlError("--redis holds a password and --redis-password-file names another: give one of them")
        read_password(path)


def read_password(path: Path) -> str:
    """The one line of a file. Raises ``RedisUrlError`` when there is none."""
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RedisUrlError(f"--redis-password-file {path} cannot be read: {error}") from error
    if not password:
        raise RedisUrlError(f"--redis-password-file {path} is empty")
    return password


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ``RedisUrlError`` naming what is wrong."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or "://" not in url:
        raise RedisUrlError(f"--redis: scheme {scheme[:20]!r} is none of {', '.join(SCHEMES)}")
    base, _, kind = scheme.partition("+")
    # Not by urlsplit: some of its versions refuse a list of hosts that has [::1] in it.
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    parts = urlsplit(rest.removeprefix(authority))
    if "@" in parts.path + parts.query + parts.fragment:  # what stands before may be half of a password
        raise RedisUrlError("--redis: the URL cannot be read: are all special characters percent-encoded?")
    nodes = tuple(_node(host, 26379 if kind == "sentinel" else 6379) for host in hosts.split(","))
    path = [unquote(word) for word in parts.path.split("/") if word]
    service = ""
    if kind == "sentinel":
        if not path:
            raise RedisUrlError(f"--redis: {scheme}:// needs the master's name: {scheme}://host:26379/name")
        service = path.pop(0)
    elif not kind and len(nodes) > 1:
        raise RedisUrlError(f"--redis: {scheme}:// names one server; for several use redis+sentinel or redis+cluster")
    if len(path) > 1 or (path and not path[0].isdigit()):
        raise RedisUrlError(f"--redis: the path of {scheme}:// ends in the number of a database")
    db = int(path[0]) if path else 0
    if kind == "cluster" and db:
        raise RedisUrlError("--redis: a cluster has database 0 only")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = (OPTIONS if base == "rediss" else ()) + (SENTINEL_OPTIONS if kind == "sentinel" else ())
    if unknown := sorted(set(options) - set(known)):
        can = f"; it knows {', '.join(known)}" if known else ""
        raise RedisUrlError(f"--redis: {scheme}:// has no option {unknown[0]!r}{can}")
    return RedisUrl(
        kind=kind or "single",
        is_tls=base == "rediss",
        nodes=nodes,
        service=service,
        db=db,
        user=unquote(user) if user else None,
        password=unquote(password) if password else None,
        options=options,
    )


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RedisUrlError(f"--redis: {text!r} is no host:port") from error
    if not host:
        raise RedisUrlError("--redis: a host is missing: redis://host:6379/0")
    return host, port or default_port
