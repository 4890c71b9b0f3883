"""What this worker tells the fleet through Redis: contract, lease, cache events, snapshots.

One task talks to Redis over one client, so that everything arrives in order: a lease tells of no event that does not
stand in the stream before it. Where no event follows one, to show its loss, a lease does, soon and not with the next
heartbeat alone. When Redis is away nothing here fails: events wait in a bounded queue, and a new snapshot follows as
soon as it is back, whether it kept its data or lost it.

Keys, prefix ``wf:{<fleet>}:``, all with a time to live that the heartbeat renews:

    contract              protobuf Contract, set by the first of the fleet, compared by everyone
    replicas              sorted set: replica id -> last heartbeat, milliseconds of Redis' clock
    replica:<id>          protobuf ReplicaLease
    events:<id>:<gen>     stream: one entry per batch, id <last seq>-0, field b = cache.events batch,
                          t = when it was made, milliseconds since 1970 by this machine's clock
    snapshot:<id>:<gen>   cache.events snapshot
    wanted:<id>:<gen>     set by a router that needs a newer snapshot; looked for a few times per heartbeat, taken away
                          and answered with one
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, ResponseError, WatchError
from warmfront_pb.v1 import common_pb2

from cache.events import EventBatch, Snapshot, encode_batch, encode_snapshot
from common.redis_client import connect_redis
from common.redis_keys import FleetKeys, is_wrong_type, remove_wrong_types
from common.redis_url import RedisUrlError, parse_redis_url
from worker.engine import EngineStoppedError

logger = logging.getLogger(__name__)

STREAM_LENGTH = 4096  # batches kept at least
MAX_QUEUED_BATCHES = 4096  # while Redis is away; beyond it a snapshot says it all
_LOOKS_PER_HEARTBEAT = 10  # for a router that has missed something: its index is wrong until it has a snapshot
_TAIL = 0.1  # of a heartbeat without events after some: then a lease says which was the last
_KEPT_LEASES = 10  # contract, stream and snapshot outlive a heartbeat by so many leases
_MAX_BACKOFF_S = 2.0
_REDIS_TIMEOUT_S = 5.0
_PUBLISH_TIMEOUT_S = 2.0


class RegistryError(Exception):
    """Redis cannot be used: wrong URL, nobody there, or no permission."""


class ContractMismatchError(Exception):
    """This worker differs from the fleet it wants to join; the message names every field."""


class FencedError(Exception):
    """A newer boot holds this replica's id: this one must stop serving."""


class Reporter:
    """Keeps one replica's entries in Redis true. ``run`` does the work until ``stop``.

    ``lease`` makes the lease for a heartbeat's number, ``put`` takes event batches, and ``take_snapshot``, once set,
    gives the cache's content. All from the event loop.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        fleet: str,
        replica_id: str,
        generation: str,
        heartbeat_s: float,
        lease_s: float,
        lease: Callable[[int], common_pb2.ReplicaLease],
        redis_password_file: Path | None = None,
        stream_length: int = STREAM_LENGTH,
    ) -> None:
        try:
            self._where = parse_redis_url(redis_url).where
        except RedisUrlError as error:
            raise RegistryError(str(error)) from error
        self._redis = connect_redis(
            redis_url, fleet=fleet, timeout_s=_REDIS_TIMEOUT_S, password_file=redis_password_file
        )
        self._keys = keys = FleetKeys(fleet)
        self._fleet = fleet
        self._replica_id = replica_id
        self._generation = generation
        self._heartbeat_s = heartbeat_s
        self._lease_ms = round(lease_s * 1000)
        self._lease = lease
        self._stream_length = stream_length
        self._contract_key = keys.contract
        self._replicas_key = keys.replicas
        self._lease_key = keys.replica(replica_id)
        self._stream_key = keys.events(replica_id, generation)
        self._snapshot_key = keys.snapshot(replica_id, generation)
        self._wanted_key = keys.wanted(replica_id, generation)
        self._contract: common_pb2.Contract | None = None
        self._queue: deque[tuple[int, EventBatch]] = deque()  # with the milliseconds since 1970 when they came
        self._wake = asyncio.Event()
        self._next_beat_s = self._next_look_s = 0.0
        self._tail_s = math.inf  # when a lease has to tell of the events since the last one, should no more come
        self._num_beats = 0
        self._num_written = 0  # of the last beat that reached Redis
        self._beaten = asyncio.Condition()
        self._num_since_snapshot = 0
        self._has_stream = False
        self._stopping = False
        self._needs_snapshot = True
        self._fetching: asyncio.Future[Snapshot] | None = None
        self.take_snapshot: Callable[[], Future[Snapshot]] | None = None
        self.is_connected = False
        self.num_repairs = 0  # of keys that somebody else had written

    async def connect(self) -> None:
        """See that Redis answers. Raises ``RegistryError``."""
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise RegistryError(f"--redis: cannot use Redis at {self._where}: {error}") from error
        self.is_connected = True

    async def join(self, contract: common_pb2.Contract, *, may_shorten: bool = False) -> common_pb2.Contract:
        """Agree with the fleet, or set its contract; the one that holds now.

        ``may_shorten``: where the fleet's longest context is shorter, take that. Raises ``ContractMismatchError`` or
        ``RegistryError``.
        """
        try:
            try:
                agreed = await self._agree(contract, may_shorten)
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                await self._repair()
                agreed = await self._agree(contract, may_shorten)
        except (RedisError, OSError) as error:
            raise RegistryError(f"--redis: lost Redis at {self._where} while joining: {error}") from error
        self._contract = agreed
        return agreed

    def put(self, batch: EventBatch) -> None:
        """Send these events. When too many wait they are dropped, and a snapshot will take their place."""
        if len(self._queue) >= MAX_QUEUED_BATCHES:
            self._queue.clear()
            self._needs_snapshot = True
            self._fetching = None  # it may be older than what was dropped
        self._queue.append((time.time_ns() // 1_000_000, batch))
        self._wake.set()

    def touch(self) -> None:
        """Rewrite the lease now: the state has changed."""
        self._next_beat_s = 0.0
        self._wake.set()

    async def publish(self) -> None:
        """Rewrite the lease now, and wait until it stands in Redis; for two seconds at most, should that be away."""
        wanted = self._num_beats + 1  # one that is being written may still tell the old state
        self.touch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PUBLISH_TIMEOUT_S), self._beaten:
                await self._beaten.wait_for(lambda: self._num_written >= wanted)

    async def run(self) -> None:
        """Heartbeats, events and snapshots until ``stop``. Raises ``FencedError`` or ``ContractMismatchError``."""
        failures = 0
        while not self._stopping:
            try:
                await self._turn()
            except (RedisError, OSError) as error:
                if not failures and not is_wrong_type(error):
                    logger.warning("redis=away error=%r queued_batches=%d", str(error), len(self._queue))
                if is_wrong_type(error):
                    await self._repair()
                failures += 1
                self.is_connected = False
                self._needs_snapshot = True
                self._next_beat_s = 0.0
                await asyncio.sleep(min(_MAX_BACKOFF_S, 0.05 * 2 ** min(failures, 6)) * random.uniform(0.5, 1.0))
                continue
            if failures:
                logger.info("redis=back attempts=%d", failures)
                failures = 0
            self.is_connected = True
            await self._pause()

    def stop(self) -> None:
        """End ``run`` after the turn that it is in. Gentler than cancelling it, which redis-py may swallow."""
        self._stopping = True
        self._wake.set()

    async def leave(self) -> None:
        """Remove everything of this boot from Redis. A lease that a newer boot has taken over stays."""
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await self._change_lease(self._remove)
        except (RedisError, OSError, FencedError) as error:
            logger.warning("left=false error=%r: the entries in Redis will expire", str(error))

    async def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _repair(self) -> None:
        """Somebody wrote something else under a key of ours: it goes, and is written anew in the next turn."""
        types = dict.fromkeys((self._lease_key, self._contract_key, self._snapshot_key), "string")
        types |= {self._replicas_key: "zset", self._stream_key: "stream"}
        for key in await remove_wrong_types(self._redis, types):
            self.num_repairs += 1
            logger.error("redis held another type under key=%s: removed, number %d", key, self.num_repairs)
            if key == self._stream_key:
                self._has_stream = False

    # One turn

    async def _turn(self) -> None:
        now = time.monotonic()
        if now >= min(self._next_beat_s, self._tail_s):
            self._tail_s = math.inf
            self._next_beat_s = now + self._heartbeat_s  # before the beat, during which the state may change again
            self._next_look_s = now + self._heartbeat_s / _LOOKS_PER_HEARTBEAT
            await self._beat()
        elif now >= self._next_look_s:
            self._next_look_s = now + self._heartbeat_s / _LOOKS_PER_HEARTBEAT
            if await self._redis.delete(self._wanted_key):
                self._needs_snapshot = True
        if self._needs_snapshot or self._num_since_snapshot >= self._stream_length // 2:
            await self._renew_snapshot()
        if self._queue:
            await self._send()

    async def _pause(self) -> None:
        """Until there is something to send, or it is time for a heartbeat or for a look."""
        next_s = min(self._next_beat_s, self._next_look_s, self._tail_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, next_s - time.monotonic())):
                await self._wake.wait()
        self._wake.clear()

    async def _beat(self) -> None:
        """Write the lease, renew what goes with it, and notice what is missing."""
        self._num_beats += 1
        answers = await self._change_lease(self._write)
        contract, has_contract, has_stream, has_snapshot, is_wanted, stream_type = answers[-6:]
        async with self._beaten:
            self._num_written = self._num_beats
            self._beaten.notify_all()
        if self._contract is not None and not has_contract:
            logger.warning("redis=emptied: writing contract and snapshot again")
            await self._agree(self._contract)
            self._needs_snapshot = True
        elif self._contract is not None and _contract(contract) is None:
            await self._agree(self._contract)
        if self._has_stream and not has_stream:
            self._has_stream = False
            self._needs_snapshot = True
        if stream_type not in (b"stream", b"none"):
            await self._repair()  # with no event to write, this replica would not meet it, but a new router would
            self._needs_snapshot = True
        if not has_snapshot or is_wanted:
            self._needs_snapshot = True

    async def _change_lease(self, change: Callable[[Pipeline, int], None]) -> list[Any]:
        """Apply ``change`` unless a newer boot holds this id (``FencedError``); Redis' answers.

        What waits goes before it in the same transaction, so that no lease tells of events that are not there yet. The
        last six answers: the contract; whether it, stream and snapshot were there; whether a snapshot was wanted; the
        stream's type.
        """
        while True:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(self._lease_key)
                holder = self._holder(await pipe.get(self._lease_key))
                seconds, microseconds = await pipe.time()
                if holder > self._generation:
                    raise FencedError(
                        f"replica id {self._replica_id} of fleet {self._fleet} is held by the newer boot {holder}; "
                        f"this one, {self._generation}, stops"
                    )
                pipe.multi()  # type: ignore[no-untyped-call]
                entries = self._add_entries(pipe)
                change(pipe, seconds * 1000 + microseconds // 1000)
                if holder and holder != self._generation:  # what an older boot has left
                    name = self._replica_id
                    pipe.delete(self._keys.events(name, holder), self._keys.snapshot(name, holder))
                pipe.get(self._contract_key)
                for key in (self._contract_key, self._stream_key, self._snapshot_key):
                    pipe.pexpire(key, _KEPT_LEASES * self._lease_ms)
                pipe.delete(self._wanted_key)
                pipe.type(self._stream_key)
                try:
                    answers: list[Any] = await pipe.execute(raise_on_error=False)
                except WatchError:  # somebody else wrote the lease just now: look again
                    continue
            _raise_first(answers[len(entries) :])
            await self._entries_added(entries, answers[: len(entries)])
            return answers

    def _write(self, pipe: Pipeline, now_ms: int) -> None:
        pipe.set(self._lease_key, self._lease(self._num_beats).SerializeToString(), px=self._lease_ms)
        pipe.zadd(self._replicas_key, {self._replica_id: now_ms})
        pipe.zremrangebyscore(self._replicas_key, "-inf", now_ms - _KEPT_LEASES * self._lease_ms)

    def _remove(self, pipe: Pipeline, now_ms: int) -> None:
        pipe.delete(self._lease_key, self._stream_key, self._snapshot_key)
        pipe.zrem(self._replicas_key, self._replica_id)

    def _holder(self, stored: bytes | str | None) -> str:
        """The boot whose lease is stored; sorts before every other where there is none, or something else."""
        if not stored:
            return ""
        try:
            lease = common_pb2.ReplicaLease.FromString(_binary(stored))
        except DecodeError:
            lease = common_pb2.ReplicaLease()
        if lease.replica == self._replica_id and lease.generation:
            return lease.generation
        self.num_repairs += 1
        logger.error("redis held no lease under key=%s: overwritten, number %d", self._lease_key, self.num_repairs)
        return ""

    async def _agree(self, contract: common_pb2.Contract, may_shorten: bool = False) -> common_pb2.Contract:
        ours = contract.SerializeToString(deterministic=True)
        ttl_ms = _KEPT_LEASES * self._lease_ms
        while not await self._redis.set(self._contract_key, ours, px=ttl_ms, nx=True):
            theirs = await self._redis.get(self._contract_key)
            if theirs is None:  # it ran out between the two
                continue
            known = _contract(theirs)
            if known is None:
                self.num_repairs += 1
                logger.error(
                    "redis held no contract under key=%s: removed, number %d", self._contract_key, self.num_repairs
                )
                await self._redis.delete(self._contract_key)
                continue
            differences = contract_differences(_shortened(contract, known) if may_shorten else contract, known)
            if not differences:
                return known
            raise ContractMismatchError(
                f"this worker cannot join fleet {self._fleet}: {'; '.join(differences)}. Set what differs as the fleet "
                f"has it, or name another --fleet; a fleet without living workers is forgotten after {ttl_ms / 1000:g}s"
            )
        return contract

    async def _renew_snapshot(self) -> None:
        """Ask the engine for the cache's content, or write it once it has come. Heartbeats go on meanwhile."""
        if self.take_snapshot is None:
            return
        if self._fetching is None:
            with contextlib.suppress(EngineStoppedError):  # then this replica is about to leave
                self._fetching = asyncio.wrap_future(self.take_snapshot())
                self._fetching.add_done_callback(lambda _: self._wake.set())
        if self._fetching is None or not self._fetching.done():
            return
        fetched, self._fetching = self._fetching, None
        snapshot = fetched.result()
        self._needs_snapshot = False
        self._num_since_snapshot = 0
        await self._redis.set(self._snapshot_key, encode_snapshot(snapshot), px=_KEPT_LEASES * self._lease_ms)

    async def _send(self) -> None:
        """Add what waits to the stream, in one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        entries = self._add_entries(pipe)
        # Each time: a newer boot, or somebody who empties Redis, may have removed the stream since the heartbeat.
        pipe.pexpire(self._stream_key, _KEPT_LEASES * self._lease_ms)
        answers = await pipe.execute(raise_on_error=False)
        await self._entries_added(entries, answers[: len(entries)])

    def _add_entries(self, pipe: Pipeline) -> list[tuple[int, EventBatch]]:
        """What waits, also as commands."""
        entries = list(self._queue)
        for made_ms, batch in entries:
            pipe.xadd(
                self._stream_key,
                {"b": encode_batch(batch), "t": made_ms},
                id=f"{batch.last_seq}-0",
                maxlen=self._stream_length,
                approximate=True,
            )
        return entries

    async def _entries_added(self, entries: Sequence[tuple[int, EventBatch]], answers: Sequence[Any]) -> None:
        """Redis has answered to these, which wait no more unless they have been refused."""
        if not entries:
            return
        last_seq = entries[-1][1].last_seq
        if any(map(_is_out_of_turn, answers)) and await self._has_strange_entry(last_seq):
            self._has_stream = False
            self._needs_snapshot = True
            return  # what waits is sent again
        # A batch sent just before the connection broke is there already; the snapshot to come covers the rest.
        _raise_first([answer for answer in answers if not _is_out_of_turn(answer)])
        while self._queue and self._queue[0][1].last_seq <= last_seq:
            self._queue.popleft()
        self._has_stream = True
        self._num_since_snapshot += len(entries)
        self._tail_s = time.monotonic() + _TAIL * self._heartbeat_s

    async def _has_strange_entry(self, last_seq: int) -> bool:
        """Whether somebody else's entry stands in the stream, after all that we have: then the stream goes."""
        newest: Any = await self._redis.xrevrange(self._stream_key, count=1)
        if not newest or int(newest[0][0].split(b"-")[0]) <= last_seq:
            return False
        await self._redis.delete(self._stream_key)
        self.num_repairs += 1
        logger.error("redis held a strange entry in key=%s: removed, number %d", self._stream_key, self.num_repairs)
        return True


def _raise_first(answers: Sequence[Any]) -> None:
    """The first of Redis' answers that is an error, if any."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer if isinstance(answer, RedisError) else ResponseError(str(answer))


def _is_out_of_turn(answer: object) -> bool:
    """Whether Redis has refused an entry since a later one stands in the stream, maybe the last that it can have."""
    return isinstance(answer, ResponseError) and any(
        words in str(answer) for words in ("equal or smaller", "exhausted the last possible ID")
    )


def contract_differences(ours: common_pb2.Contract, theirs: common_pb2.Contract) -> list[str]:
    """Each field in which two contracts differ, with both values."""
    differences = []
    for field in common_pb2.Contract.DESCRIPTOR.fields:
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            differences.append(f"{field.name} is {here} here and {there} in the fleet")
    same_scheme = ours.hash_algorithm == theirs.hash_algorithm and ours.block_size == theirs.block_size
    if ours.hash_scheme != theirs.hash_scheme and same_scheme:
        differences.append("the hash seed differs (WARMFRONT_HASH_SEED or --prefix-caching-hash-seed-file)")
    return differences


def _shortened(contract: common_pb2.Contract, known: common_pb2.Contract) -> common_pb2.Contract:
    """With the longest context of ``known``, where that is the shorter one."""
    shortened = common_pb2.Contract()
    shortened.CopyFrom(contract)
    shortened.max_model_len = min(contract.max_model_len, known.max_model_len)
    return shortened


def _contract(stored: bytes | str | None) -> common_pb2.Contract | None:
    """A stored contract; None for what is none."""
    try:
        contract = common_pb2.Contract.FromString(_binary(stored)) if stored else None
    except DecodeError:
        return None
    return contract if contract is not None and contract.model and contract.block_size else None


def _binary(value: bytes | str) -> bytes:
    assert isinstance(value, bytes), "the client does not decode"
    return value
