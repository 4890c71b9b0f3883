"""Carries the routers' loads over Redis: this one's totals and steps out, the others' in.

``load:<router>`` holds a router's totals under a lease and is rewritten at least every heartbeat, within 50 ms of a
change; ``routers`` lists who has such a key. The bounded stream ``dispatch`` carries the steps within some
milliseconds, while there is anybody to read them. With Redis away a router decides by its own counts, and starts
afresh when Redis is back.
"""

from __future__ import annotations

import asyncio
import logging
import time

import redis.asyncio as redis_asyncio
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError, ResponseError
from warmfront_pb.v1 import router_pb2

from common.redis_client import Line
from common.redis_keys import FleetKeys, is_wrong_type, remove_wrong_types
from router.config import RouterConfig
from router.load import Journal, LoadBook
from router.peer_loads import PeerLoads, batch_of, totals_of

log = logging.getLogger(__name__)

_FIELD = b"b"
_TOTALS_PERIOD_S = 0.05  # while something changes
_STEPS_PERIOD_S = 0.004  # steps that come closer together share an entry
_READ_PERIOD_S = 0.002  # entries that come closer together share a read
_LOOKS_PER_HEARTBEAT = 4
_READ_BLOCK_MS = 100
_READ_COUNT = 512
_STREAM_LENGTH = 4096
_HISTORY_MS = 5_000  # a router that starts reads the stream from there on: what is pending stands in it
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 1.0


class SharedLoad:
    """Gives ``loads`` a journal and keeps it told; adds the others' load to it."""

    def __init__(self, client: redis_asyncio.Redis, keys: FleetKeys, config: RouterConfig, loads: LoadBook) -> None:
        self._client = client
        self._reading, self._writing = Line(client), Line(client)
        self._keys = keys
        self._router = config.router_id
        self._lease_ms = round(config.lease_s * 1000)
        self._heartbeat_s = config.heartbeat_s
        self._loads = loads
        self._boot = f"{time.time_ns() // 1_000_000:012x}"
        self._has_news = asyncio.Event()
        self._journal = loads.journal = Journal(self._has_news.set)
        self._cursor = ""  # of the stream; empty: begin with its recent past
        self._is_stopped = False
        self._num_repairs = 0
        self.is_refused = False  # Redis answers and takes no writes: it is full, or somebody's replica
        self.peers = PeerLoads(loads, self._router, self._boot)

    async def start(self) -> None:
        """Say that this router is there and hear of the others once, so that the first decision knows their load."""
        try:
            await self._write(with_totals=True)
            await self._enlist()
            await self._look()
            await self._read(block_ms=1)
        except (RedisError, OSError) as error:
            log.warning("the other routers' load is not known, redis is away error=%r", str(error))

    async def run_writer(self) -> None:
        """Tell what this router does until stopped."""
        totals_at_s = time.monotonic() + self._heartbeat_s
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                async with asyncio.timeout(max(0.0, totals_at_s - time.monotonic())):
                    await self._has_news.wait()
            except TimeoutError:
                pass
            has_news = self._has_news.is_set()
            self._has_news.clear()
            is_due = time.monotonic() >= totals_at_s
            try:
                if is_due or len(self.peers):
                    await self._write(with_totals=is_due)
                    self._set_refused("")
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError) as error:
                if is_wrong_type(error):
                    await self._repair()
                elif isinstance(error, ResponseError):
                    self._set_refused(str(error))
                self._has_news.set()
                await asyncio.sleep(pause_s)
                pause_s = min(_LAST_RETRY_S, 2 * pause_s)
                continue
            now = time.monotonic()
            if is_due:
                totals_at_s = now + self._heartbeat_s
            if has_news:
                totals_at_s = min(totals_at_s, now + _TOTALS_PERIOD_S)
            await asyncio.sleep(_STEPS_PERIOD_S if len(self.peers) else _TOTALS_PERIOD_S)

    async def run_reader(self) -> None:
        """Hear what the others do until stopped."""
        look_at_s = enlist_at_s = 0.0
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                if (now := time.monotonic()) >= look_at_s:
                    if not await self._look() or now >= enlist_at_s:
                        await self._enlist()
                        enlist_at_s = now + self._heartbeat_s
                    look_at_s = now + self._heartbeat_s / _LOOKS_PER_HEARTBEAT
                if await self._read(_READ_BLOCK_MS):
                    await asyncio.sleep(_READ_PERIOD_S)
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError) as error:
                if is_wrong_type(error):
                    await self._repair()
                elif self._cursor:
                    log.warning("decisions go by this router's own load, redis is away error=%r", str(error))
                self.peers.clear(time.monotonic())
                self._cursor = ""
                await asyncio.sleep(pause_s)
                pause_s = min(_LAST_RETRY_S, 2 * pause_s)

    def stop(self) -> None:
        """Let the loops end, should they survive their cancellation."""
        self._is_stopped = True
        self._has_news.set()

    async def leave(self) -> None:
        """This router has no share any more. After its loops have ended."""
        try:
            await self._client.delete(self._keys.load(self._router))
        except (RedisError, OSError) as error:
            log.debug("this router's share goes with its lease, redis is away error=%r", str(error))

    def _set_refused(self, why: str) -> None:
        if self.is_refused != bool(why):
            self.is_refused = bool(why)
            if why:
                log.warning("redis takes no writes, so leases do not run out error=%r", why)
            else:
                log.info("redis takes writes")

    async def _repair(self) -> None:
        """Somebody wrote something else under a key of the routers': it goes, and is written anew."""
        types = {self._keys.routers: "set", self._keys.dispatch: "stream"}
        for key in await remove_wrong_types(self._client, types):
            self._num_repairs += 1
            log.error("redis held another type under key=%s: removed, number %d", key, self._num_repairs)

    async def _write(self, with_totals: bool) -> None:
        steps = self._journal.take()  # what cannot be sent is in the next totals
        totals = totals_of(self._loads, self._boot).SerializeToString() if with_totals else None
        if steps and len(self.peers):
            batch = batch_of(self._router, self._boot, steps).SerializeToString()
            await self._writing.ask("XADD", self._keys.dispatch, "MAXLEN", "~", _STREAM_LENGTH, "*", _FIELD, batch)
        if totals is not None:
            await self._writing.ask("SET", self._keys.load(self._router), totals, "PX", self._lease_ms)

    async def _enlist(self) -> None:
        """Be on the list of routers, and keep the shared keys alive."""
        await self._reading.ask("SADD", self._keys.routers, self._router)
        for key in (self._keys.routers, self._keys.dispatch):
            await self._reading.ask("PEXPIRE", key, 10 * self._lease_ms)

    async def _look(self) -> bool:
        """Read everybody's totals; whether this router is on the list."""
        found = await self._reading.ask("SMEMBERS", self._keys.routers)
        members = {member.decode(errors="replace"): member for member in found}  # others may write what is no UTF-8
        is_listed = members.pop(self._router, None) is not None
        names = sorted(members)
        values = await self._reading.ask("MGET", *map(self._keys.load, names)) if names else ()
        gone = [members[name] for name, data in zip(names, values, strict=True) if data is None]
        if gone:
            await self._client.srem(self._keys.routers, *gone)
        totals = {}
        for name, data in zip(names, values, strict=True):
            try:
                if data is not None:
                    totals[name] = router_pb2.RouterLoad.FromString(data)
            except DecodeError as error:
                log.warning("bad load of a router router=%s error=%r", name, str(error))
        self.peers.observe(totals, time.monotonic())
        return is_listed

    async def _read(self, block_ms: int) -> bool:
        """Wait up to ``block_ms`` for something new in the stream and take it in; whether anything came."""
        if not self._cursor:
            seconds, _ = await self._client.time()
            self._cursor = f"{max(0, seconds * 1000 - _HISTORY_MS)}-0"
        reply = await self._reading.read_streams({self._keys.dispatch.encode(): self._cursor}, _READ_COUNT, block_ms)
        now = time.monotonic()
        for _, entries in reply:
            for entry_id, fields in entries:
                self._cursor = entry_id.decode()
                try:
                    self.peers.take(router_pb2.DispatchBatch.FromString(fields[_FIELD]), now)
                except (DecodeError, KeyError) as error:
                    log.warning("bad dispatch entry entry=%s error=%r", self._cursor, str(error))
        return bool(reply)
