"""The index equals the caches, whatever happens on the way: real caches, a real Valkey, every kind of fault.

Truth is what the replica's cache itself would match. Faults: lost, late, duplicate and corrupt batches, restarts,
an emptied Redis, cleared caches. After each round one heartbeat has to be enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ResponseError

from cache.block_hash import BlockChain
from cache.events import EventBatch, Stored, Tier, encode_batch
from cache.prefix_index import PrefixIndex
from common.redis_client import connect_redis
from router.index_mirror import IndexMirror
from router.metrics import RouterMetrics
from router.registry import FleetKeys, Membership, Registry
from tests.fakes.simulated_worker import SimulatedWorker, Spec
from tests.router.conftest import Cluster, until

BLOCK = 4
BLOCKS = 60
ROUND = 2000  # steps between two heartbeats


class Mirrored:
    """Replicas driven by hand, and a mirror that follows them as a router's does."""

    def __init__(self, redis_url: str, fleet: str, rng: random.Random) -> None:
        self.redis_url, self.fleet, self.rng = redis_url, fleet, rng
        self.client = connect_redis(redis_url, fleet="tests", timeout_s=2.0)
        keys = FleetKeys(fleet)
        self.keys = keys
        self.metrics = RouterMetrics()
        self.applied: dict[str, int] = {}
        self.mirror = IndexMirror(
            self.client, keys, PrefixIndex(), self.metrics, on_applied=self._on_applied, rng=random.Random(1)
        )
        self.registry = Registry(self.client, keys, Membership(fleet, lease_s=1000), lambda contract: "")
        self.workers: dict[str, SimulatedWorker] = {}
        self.chains: dict[str, list[BlockChain]] = {}
        self.boots = 0
        self.requests = 0

    def _on_applied(self, replica: str, seq: int) -> None:
        self.applied[replica] = seq

    async def boot(self, replica: str) -> SimulatedWorker:
        if replica in self.workers:
            await self.workers[replica].stop()
        self.boots += 1
        spec = Spec(
            self.redis_url,
            replica=replica,
            fleet=self.fleet,
            generation=f"{self.boots:012x}-000000",
            num_blocks=BLOCKS,
            num_host_blocks=BLOCKS // 2 if replica == "w1" else 0,
            block_size=BLOCK,
            lease_s=1000,
            heartbeat_s=1000,  # beaten by hand
        )
        worker = self.workers[replica] = SimulatedWorker(spec)
        self.chains[replica] = []
        return worker

    def work(self, replica: str) -> None:
        """One request from a few families of prompts, begun and ended."""
        worker = self.workers[replica]
        family = self.rng.randrange(6)
        length = self.rng.randrange(1, 10) * BLOCK + self.rng.randrange(BLOCK)
        tokens = [family * 100 + position // (BLOCK * 3) for position in range(length)]
        if self.rng.random() < 0.3:
            tokens[-3:] = [self.rng.randrange(10_000)] * len(tokens[-3:])
        chain = worker.scheme.chain(tokens)
        self.requests += 1
        if worker.cache.admit(self.requests, chain) is None:
            return
        worker.cache.commit(self.requests, len(tokens))
        worker.cache.free(self.requests)
        self.chains[replica] = [*self.chains[replica][-40:], chain]

    async def look(self) -> None:
        """What a router does four times per heartbeat."""
        changes = await self.registry.poll(time.monotonic())
        assert changes is not None
        for replica in changes.left:
            self.mirror.forget(replica.id)
        for replica in self.registry.membership.replicas.values():
            self.mirror.follow(replica.id, replica.generation)
            self.mirror.audit(replica.lease)

    def is_true(self, replica: str) -> bool:
        worker = self.workers[replica]
        index = self.mirror.index
        held = [worker.cache.num_cached_blocks, worker.cache.num_host_cached_blocks]
        if [index.num_blocks(replica, tier) for tier in Tier] != held:
            return False
        for chain in self.chains[replica]:
            longer = worker.scheme.chain([*chain.token_ids, 1])  # so that the last block may match as well
            depths = index.match(chain.keys)
            if (depths[replica].total if replica in depths else 0) != worker.cache.match(longer) // BLOCK:
                return False
        return True

    async def settle(self) -> None:
        """Heartbeats of each replica; the index must become right without any further event."""
        end = time.monotonic() + 20
        while True:
            for worker in self.workers.values():
                await worker.report()
            for _ in range(8):
                await self.look()
                if all(map(self.is_true, self.workers)):
                    break
                await asyncio.sleep(0.01)
            else:
                assert time.monotonic() < end, [
                    (name, self.is_true(name), self.mirror.applied_seq(name), worker.cache.last_seq)
                    for name, worker in self.workers.items()
                ]
                continue
            break
        self.mirror.index.check_invariants()

    async def forget_everything(self) -> None:
        found = [key async for key in self.client.scan_iter(match=f"wf:{{{self.fleet}}}:*")]
        if found:
            await self.client.delete(*found)


@asynccontextmanager
async def mirrored(redis_url: str, fleet: str, seed: int = 0) -> AsyncIterator[Mirrored]:
    one = Mirrored(redis_url, fleet, random.Random(seed))
    task = asyncio.create_task(one.mirror.run())
    yield one
    one.mirror.stop()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for worker in one.workers.values():
        await worker.stop()
    await one.client.aclose()


async def xadd(one: Mirrored, replica: str, entry_id: str, data: bytes) -> None:
    stream = one.keys.events(replica, one.workers[replica].generation)
    await one.client.xadd(stream, {"b": data}, id=entry_id)


async def drive(redis_url: str, seed: int, num_steps: int) -> None:
    """Requests, and now and then a fault; once a round of steps a heartbeat, after which the index must be true."""
    rng = random.Random(seed)
    async with mirrored(redis_url, f"model-{seed}", seed) as one:
        for name in ("w0", "w1", "w2"):
            await one.boot(name)
        for _round in range(num_steps // ROUND):
            for _step in range(ROUND):
                name = rng.choice(list(one.workers))
                worker = one.workers[name]
                one.work(name)
                action = rng.random()
                if action < 0.02:
                    await worker.report_events()
                elif action < 0.025:
                    worker.faults.lost_batches = rng.randrange(1, 3)
                    await worker.report_events()
                elif action < 0.027:
                    await worker.report_events()
                    old = EventBatch(name, worker.generation, 1, (Stored(0, worker.scheme.keys([1] * BLOCK)),))
                    with contextlib.suppress(ResponseError):  # its id is behind the stream's: it can never be read
                        await xadd(one, name, f"{worker.cache.last_seq}-1", encode_batch(old))
                elif action < 0.029:
                    worker.faults.corrupt_batches = 1
                    await worker.report_events()
                elif action < 0.030:
                    worker.cache.reset()
                    await worker.report_events()
                elif action < 0.031:
                    await one.boot(name)
                elif action < 0.0315:
                    await one.forget_everything()
            await one.settle()


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_index_is_true_after_every_heartbeat(redis_url: str, seed: int) -> None:
    await drive(redis_url, seed, 26_000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 7))
async def test_the_index_is_true_after_a_million_steps(redis_url: str, seed: int) -> None:
    await drive(redis_url, seed, int(250_000 * float(os.environ.get("SOAK_SCALE", "1"))))


async def test_a_gap_is_counted_and_healed_by_the_snapshot(redis_url: str) -> None:
    async with mirrored(redis_url, "gap") as one:
        worker = await one.boot("w0")
        one.work("w0")
        await one.settle()
        for _ in range(5):
            one.work("w0")
        worker.faults.lost_batches = 1
        await worker.report_events()
        one.work("w0")
        one.work("w0")
        await one.settle()
        assert one.metrics.index_gaps._value.get() + one.metrics.index_resyncs._value.get() >= 1


async def test_a_lost_last_event_of_an_idle_replica_heals_by_its_lease(redis_url: str) -> None:
    async with mirrored(redis_url, "idle") as one:
        worker = await one.boot("w0")
        await one.settle()
        for _ in range(20):
            one.work("w0")
        worker.faults.lost_batches = 1
        await worker.report_events()
        await one.settle()
        assert one.metrics.index_gaps._value.get() == 0


async def test_one_corrupt_batch_between_two_good_ones_costs_itself_alone(redis_url: str) -> None:
    async with mirrored(redis_url, "corrupt") as one:
        worker = await one.boot("w0")
        await one.settle()
        first = EventBatch("w0", worker.generation, 1, (Stored(0, worker.scheme.keys([1] * BLOCK)),))
        third = EventBatch("w0", worker.generation, 3, (Stored(0, worker.scheme.keys([2] * BLOCK)),))
        await xadd(one, "w0", "1-0", encode_batch(first))
        await xadd(one, "w0", "2-0", b"\xffno batch")
        await xadd(one, "w0", "3-0", encode_batch(third))
        await until(lambda: one.mirror.applied_seq("w0") == 3)
        assert one.mirror.index.num_blocks("w0") == 2
        assert one.metrics.index_bad_events._value.get() == 1
        assert one.metrics.index_gaps._value.get() == 1  # its numbers never came


async def test_late_events_of_a_replica_that_left_bring_nothing_back(redis_url: str) -> None:
    async with mirrored(redis_url, "late") as one:
        worker = await one.boot("w0")
        one.work("w0")
        await one.settle()
        one.mirror.forget("w0")
        for _ in range(5):
            one.work("w0")
            await worker.report_events()
        await asyncio.sleep(0.3)
        assert one.mirror.index.num_blocks("w0") == 0


async def test_a_new_mirror_knows_roots_that_were_told_long_ago(redis_url: str) -> None:
    async with mirrored(redis_url, "fresh") as one:
        worker = await one.boot("w0")
        for _ in range(50):
            one.work("w0")
            await worker.report_events()
        worker._needs_snapshot = True
        await worker.report()
        await one.client.xtrim(one.keys.events("w0", worker.generation), maxlen=0)
        await one.settle()
        await until(one.mirror.is_loaded)
        assert one.metrics.index_gaps._value.get() == 0


async def test_what_was_applied_is_told_only_after_it_stands_in_the_index(redis_url: str) -> None:
    async with mirrored(redis_url, "told") as one:
        worker = await one.boot("w0")
        one.work("w0")
        await one.settle()
        assert one.applied["w0"] == worker.cache.last_seq == one.mirror.applied_seq("w0")


async def test_the_mode_says_local_while_redis_is_away(redis_url: str) -> None:
    async with mirrored(redis_url, "mode") as one:
        await one.boot("w0")
        one.work("w0")
        await one.settle()
        await until(lambda: one.mirror.mode == "live")
        one.client.connection_pool.connection_kwargs["port"] = 1
        await one.client.connection_pool.disconnect()
        await until(lambda: one.mirror.mode == "local")
        assert one.mirror.index.num_blocks("w0") > 0


async def test_the_way_of_events_into_the_index_is_timed(cluster: Cluster) -> None:
    worker = await cluster.add_worker("w0")
    await cluster.add_router()

    def num_timed() -> float:
        found = cluster.router.metrics.registry.get_sample_value("warmfront_router_index_event_lag_seconds_count")
        return found or 0.0

    await until(lambda: cluster.router.fleet.mirror.mode == "live")
    before = num_timed()
    for letter in "abc":
        await cluster.http.post("/v1/completions", json={"prompt": letter * 100, "max_tokens": 2})
    await until(cluster.index_is_true)
    await until(lambda: num_timed() >= before + 3)
    assert worker.cache.last_seq >= 3
