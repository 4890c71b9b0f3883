"""Opens what ``--redis`` names, always as the plain client of one server: the one that has the fleet's keys.

All keys of a fleet lie in one slot of a cluster, so whoever owns that slot has them all, and pipelines, transactions
and blocking reads work there as on a single server. Which server that is, as which is a master among replicas, is asked
for whenever a connection is opened, and a connection whose server has lost that part is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from hiredis import pack_command
from redis import asyncio as aioredis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.redis_url import OPTIONS, RedisUrl, RedisUrlError, parse_redis_url, read_password

Finder: TypeAlias = Callable[[], Awaitable[tuple[str, int]]]


def connect_redis(url: str, *, fleet: str, timeout_s: float, password_file: Path | None = None) -> aioredis.Redis:
    """A client that opens nothing yet, waits ``timeout_s`` at most and tries once: its callers know when to try again.

    ``password_file`` is read for each connection, so that a password may change. Raises ``RedisUrlError``.
    """
    where = parse_redis_url(url)
    kwargs: dict[str, Any] = {
        "db": where.db,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        **_credentials(where.user, where.password, password_file),
    }
    tls = _tls(where)
    plain: type[Connection] = SSLConnection if where.is_tls else Connection
    if where.kind == "single":
        host, port = where.nodes[0]
        pool = ConnectionPool(connection_class=plain, host=host, port=port, **kwargs, **tls)
        return aioredis.Redis.from_pool(pool)

    asks = dict(kwargs)
    if where.kind == "sentinel":
        for name in ("credential_provider", "username", "password"):
            asks.pop(name, None)
        secret = where.options.get("sentinel_password_file")
        asks |= {"db": 0, **_credentials(where.options.get("sentinel_user"), None, Path(secret) if secret else None)}

    def open_one(host: str, port: int) -> aioredis.Redis:
        return aioredis.Redis.from_pool(ConnectionPool(connection_class=plain, host=host, port=port, **asks, **tls))

    slot = key_slot(f"{{{fleet}}}".encode())

    async def find() -> tuple[str, int]:
        failure: Exception | None = None
        for host, port in where.nodes:
            client = open_one(host, port)
            try:
                if where.kind == "sentinel":
                    return await _master(client, where.service)
                return await _owner(client, slot, host)
            except (RedisError, OSError) as error:
                failure = error
            finally:
                await client.aclose()
        raise RedisConnectionError(f"{where.where}: {failure}") from failure

    found: type[Connection] = _FoundSSLConnection if where.is_tls else _FoundConnection
    return aioredis.Redis.from_pool(ConnectionPool(connection_class=found, find=find, **kwargs, **tls))


class Line:
    """One of a client's connections, for a loop that sends a command, waits for its answer and sends the next.

    A client takes a connection from its pool for each command, sends it in a task of its own and keeps count: twice
    the work of this. What it raises, and when it gives up, is the same.
    """

    def __init__(self, client: aioredis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._timeout_s: float | None = None

    async def ask(self, *command: bytes | str | int) -> Any:
        """The answer as it came. Raises ``RedisError`` or ``OSError``."""
        if self._connection is None:
            connection = await self._pool.get_connection()
            self._timeout_s, connection.socket_timeout = connection.socket_timeout, None
            self._connection = connection
        connection = self._connection
        try:
            async with asyncio.timeout(self._timeout_s):
                # The library's own Python takes seven times as long to make the same of it.
                packed = pack_command(command)  # type: ignore[arg-type]  # its stub knows tuples of one alone
                await connection.send_packed_command(packed, check_health=False)
                return await connection.read_response()
        except ResponseError:
            raise
        except BaseException as error:  # whatever may still come belongs to nobody
            self._connection = None
            connection.socket_timeout = self._timeout_s
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError(f"no answer within {self._timeout_s:g} s") from None
            raise

    async def read_streams(
        self, cursors: Mapping[bytes, str], count: int, block_ms: int
    ) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
        """XREAD: by stream what comes after its cursor, as entry ids and fields. Raises as ``ask``."""
        reply = await self.ask("XREAD", "BLOCK", block_ms, "COUNT", count, "STREAMS", *cursors, *cursors.values())
        return [
            (stream, [(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in entries])
            for stream, entries in reply or ()
        ]


class _Found(Connection):
    """A connection to whoever is found when it is opened."""

    def __init__(self, *, find: Finder, **kwargs: Any) -> None:
        self._find = find
        super().__init__(**kwargs)

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await self._find()
        await super().connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except (ReadOnlyError, MovedError) as error:
            await self.disconnect()
            raise RedisConnectionError(f"{self.host}:{self.port} has lost the keys to another server") from error


class _FoundConnection(_Found):
    pass


class _FoundSSLConnection(_Found, SSLConnection):
    pass


class _PasswordFile(CredentialProvider):
    """A user whose password stands in a file."""

    def __init__(self, user: str | None, path: Path) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = read_password(self._path)
        except RedisUrlError as error:
            raise RedisConnectionError(str(error)) from error
        return (self._user, password) if self._user is not None else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()  # as redis-py's own does, which warns of itself each time


def _credentials(user: str | None, password: str | None, password_file: Path | None) -> dict[str, Any]:
    if password_file is None:
        return {"username": user, "password": password}
    return {"credential_provider": _PasswordFile(user, password_file)}


def _tls(where: RedisUrl) -> dict[str, Any]:
    if not where.is_tls:
        return {}
    options: dict[str, Any] = {name: value for name, value in where.options.items() if name in OPTIONS}
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() in ("1", "true", "yes")
    return {"ssl_min_version": ssl.TLSVersion.TLSv1_2, **options}


async def _master(sentinel: Any, service: str) -> tuple[str, int]:
    found = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    if found is None:
        raise RedisConnectionError(f"a sentinel knows no master {service!r}")
    host, port = found
    return _text(host), int(port)


async def _owner(node: Any, slot: int, asked: str) -> tuple[str, int]:
    """CLUSTER SLOTS has rows [first, last, [host, port, ...], replicas...]; no host means that of the node asked."""
    for first, last, master, *_ in await node.execute_command("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return _text(master[0]) if master[0] else asked, int(master[1])
    raise RedisConnectionError(f"no node of the cluster has slot {slot}, where the fleet's keys belong")


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
