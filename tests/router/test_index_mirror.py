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
from array import array
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ResponseError
from warmfront_pb.v1 import common_pb2

from cache.block_hash import BlockChain
from cache.events import EventBatch, Snapshot, Stored, Tier, encode_batch, encode_snapshot
from cache.prefix_index import Outcome, PrefixIndex
from common.redis_client import connect_redis
from common.redis_keys import FleetKeys
from router.index_mirror import IndexMirror
from router.metrics import REFUSED, RouterMetrics
from router.registry import Membership, Registry
from tests.fakes.simulated_worker import SimulatedWorker, Spec
from tests.router.conftest import Cluster
from tests.support import until

BLOCK = 4
BLOCKS = 60
ROUND = 2000  # steps between two heartbeats
OUTCOMES = [*(outcome.value for outcome in Outcome), REFUSED]


class HeldUpIndex(PrefixIndex):
    """One that stops in the middle of a snapshot until it may go on; ``has_begun`` once it does."""

    has_begun = may_go_on = False

    def loading(self, replica: str, generation: str, seq: int, runs: Iterable[Stored]) -> Generator[None, None, None]:
        for number, _ in enumerate(super().loading(replica, generation, seq, runs)):
            self.has_begun = True
            yield
            while number == 20 and not self.may_go_on:
                yield


class Mirrored:
    """Replicas driven by hand, and a mirror that follows them as a router's does."""

    def __init__(self, redis_url: str, fleet: str, rng: random.Random, index: PrefixIndex) -> None:
        self.redis_url, self.fleet, self.rng = redis_url, fleet, rng
        self.client = connect_redis(redis_url, fleet="tests", timeout_s=2.0)
        keys = FleetKeys(fleet)
        self.keys = keys
        self.metrics = RouterMetrics()
        self.applied: dict[str, int] = {}
        self.mirror = IndexMirror(
            self.client, keys, index, self.metrics, on_applied=self._on_applied, rng=random.Random(1)
        )
        self.registry = Registry(self.client, keys, Membership(fleet, lease_s=1000), lambda contract: "")
        self.workers: dict[str, SimulatedWorker] = {}
        self.chains: dict[str, list[BlockChain]] = {}
        self.boots = 0
        self.requests = 0

    def num_batches(self, outcome: str) -> float:
        return self.metrics.index_batches.labels(outcome)._value.get()

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
        family = self.rng.randrange(6)
        length = self.rng.randrange(1, 10) * BLOCK + self.rng.randrange(BLOCK)
        tokens = [family * 100 + position // (BLOCK * 3) for position in range(length)]
        if self.rng.random() < 0.3:
            tokens[-3:] = [self.rng.randrange(10_000)] * len(tokens[-3:])
        self.ask(replica, tokens)

    def ask(self, replica: str, tokens: list[int]) -> None:
        worker = self.workers[replica]
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

    async def beat(self, count: int) -> None:
        """Heartbeats of each replica, and a router's looks at them."""
        for _ in range(count):
            for worker in self.workers.values():
                await worker.report()
            for _ in range(4):
                await self.look()
                await asyncio.sleep(0.01)

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
async def mirrored(
    redis_url: str, fleet: str, seed: int = 0, index: PrefixIndex | None = None
) -> AsyncIterator[Mirrored]:
    if index is None:
        index = PrefixIndex(part_blocks=40)  # a snapshot of ours is of several parts
    one = Mirrored(redis_url, fleet, random.Random(seed), index)
    task = asyncio.create_task(one.mirror.run())
    try:
        yield one
    finally:
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
    started_s = time.monotonic()
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
        outcomes = {outcome: int(one.num_batches(outcome)) for outcome in OUTCOMES}
        resyncs = int(one.metrics.index_resyncs._value.get())
        print(f"{num_steps} steps, {time.monotonic() - started_s:.0f} s, batches {outcomes}, {resyncs} resyncs")


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_index_is_true_after_every_heartbeat(redis_url: str, seed: int) -> None:
    await drive(redis_url, seed, 26_000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 7))
async def test_the_index_is_true_after_a_million_steps(redis_url: str, seed: int) -> None:
    await drive(redis_url, seed, int(250_000 * float(os.environ.get("SOAK_SCALE", "1"))))


async def test_events_that_all_arrive_never_contradict_the_index(redis_url: str) -> None:
    rng = random.Random(9)
    async with mirrored(redis_url, "no-fault") as one:
        for name in ("w0", "w1"):  # the second has a host tier
            await one.boot(name)
        for step in range(3_000):
            name = rng.choice(list(one.workers))
            one.work(name)
            action = rng.random()
            if action < 0.1:
                await one.workers[name].report_events()
            elif action < 0.105:
                one.workers[name].cache.reset()
            elif action < 0.106:
                await one.boot(name)
            if step % 500 == 499:
                await one.settle()
        counts = {outcome: one.num_batches(outcome) for outcome in OUTCOMES}
        assert counts.pop("applied") > 100
        assert set(counts.values()) == {0}
        assert one.metrics.index_resyncs._value.get() == one.metrics.index_bad_events._value.get() == 0


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
        assert one.metrics.index_gaps._value.get() == 1
        assert one.metrics.index_resyncs._value.get() == 1
        assert one.num_batches("gap") == 1
        assert one.num_batches("contradicted") == one.num_batches("refused") == 0


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


async def test_one_lease_that_tells_of_a_lost_event_is_enough_to_ask_for_a_snapshot(redis_url: str) -> None:
    async with mirrored(redis_url, "one-lease") as one:
        worker = await one.boot("w0")
        one.work("w0")
        await one.settle()
        one.work("w0")
        worker.faults.lost_batches = 1
        await worker.report()
        assert one.mirror.applied_seq("w0") < worker.cache.last_seq
        await one.look()
        await until(lambda: one.client.exists(one.keys.wanted("w0", worker.generation)))
        await worker.report()
        await until(lambda: one.is_true("w0"))


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


LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


@pytest.mark.parametrize(
    ("entry_id", "ahead", "is_busy"),
    [(LAST_ID, 0, True), (LAST_ID, 1, False), (LAST_ID, 2**63, True), ("", 1, False), ("", 5, True), ("", 1000, True)],
)
async def test_what_a_stranger_writes_into_a_stream_is_not_believed_for_long(
    redis_url: str, entry_id: str, ahead: int, is_busy: bool
) -> None:
    """Of whatever number and under whatever id, the last that a stream can have included: nothing follows that."""
    async with mirrored(redis_url, f"strange-{entry_id[-1:]}-{ahead}-{is_busy}") as one:
        worker = await one.boot("w0")
        for _ in range(10):
            one.work("w0")
        await one.settle()
        seq = worker.cache.last_seq + ahead
        lie = Stored(0, worker.scheme.keys(list(range(5 * BLOCK))))
        data = encode_batch(EventBatch("w0", worker.generation, seq, (lie,))) if ahead else b"no batch at all"
        await xadd(one, "w0", entry_id or f"{seq}-0", data)
        await asyncio.sleep(0.1)
        if is_busy:
            for _ in range(5):
                one.work("w0")
                await worker.report_events()
        await one.settle()
        for _ in range(20):  # and so it stays
            one.work("w0")
            await worker.report_events()
        await one.settle()
        assert one.mirror.applied_seq("w0") == one.applied["w0"] == worker.cache.last_seq


async def test_a_stranger_is_told_of_once_where_the_replica_s_engine_makes_no_snapshot(redis_url: str) -> None:
    async with mirrored(redis_url, "strange-and-hung") as one:
        worker = await one.boot("w0")
        for _ in range(10):
            one.work("w0")
        await one.settle()
        resyncs = one.metrics.index_resyncs._value.get()
        lie = Stored(0, worker.scheme.keys(list(range(5 * BLOCK))))
        seq = worker.cache.last_seq + 1
        await xadd(one, "w0", f"{seq}-0", encode_batch(EventBatch("w0", worker.generation, seq, (lie,))))
        await until(lambda: one.mirror.applied_seq("w0") == seq)
        lease = common_pb2.ReplicaLease()
        lease.CopyFrom(one.registry.membership.replicas["w0"].lease)
        for _ in range(20):  # its leases go on, with nothing new
            lease.heartbeat += 1
            one.mirror.audit(lease)
        assert one.metrics.index_resyncs._value.get() == resyncs + 1
        await one.settle()


async def test_a_stranger_s_snapshot_is_not_believed_for_long(redis_url: str) -> None:
    async with mirrored(redis_url, "strange-snapshot") as one:
        worker = await one.boot("w0")
        for _ in range(10):
            one.work("w0")
        await worker.report()
        lie = Snapshot("w0", worker.generation, 2**64 - 1, (Stored(0, worker.scheme.keys(list(range(5 * BLOCK)))),))
        await one.client.set(one.keys.snapshot("w0", worker.generation), encode_snapshot(lie))
        await one.look()
        await until(lambda: one.mirror.applied_seq("w0") == lie.seq)
        await one.settle()
        for _ in range(20):
            one.work("w0")
        await one.settle()


async def test_an_index_that_must_forget_some_blocks_asks_for_them_only_when_there_is_room(redis_url: str) -> None:
    async with mirrored(redis_url, "bound", index=PrefixIndex(max_blocks=75)) as one:
        for first_token, name in ((100, "w0"), (200, "w2")):
            await one.boot(name)
            for number in range(3):
                one.ask(name, [first_token + number] * (15 * BLOCK))
            await one.beat(2)
            await until(lambda: one.mirror.applied_seq(name) == one.workers[name].cache.last_seq)  # noqa: B023
        index = one.mirror.index
        assert [index.num_blocks(name) for name in ("w0", "w2")] == [15, 45], "90 are too many: the coldest 30 go"
        await one.beat(10)
        one.ask("w0", [300] * (2 * BLOCK))
        await one.beat(10)
        assert [index.num_blocks(name) for name in ("w0", "w2")] == [17, 45]
        assert one.mirror.mode == "live"
        assert one.metrics.index_resyncs._value.get() == 0
        left = one.workers.pop("w2")
        left.state = common_pb2.GONE
        await left.report()
        await left.stop()
        await one.settle()
        assert index.is_complete("w0")
        assert one.metrics.index_resyncs._value.get() == 1


async def test_an_engine_whose_events_never_fit_costs_few_snapshots(redis_url: str) -> None:
    async with mirrored(redis_url, "unfit") as one:
        worker = await one.boot("w0")
        started_s = time.monotonic()
        runs: list[Stored] = []
        for seq in range(1, 201):
            run = Stored(0, worker.scheme.keys([seq // 2] * BLOCK))  # each block is told twice
            if not runs or runs[-1].keys != run.keys:
                runs.append(run)
            snapshot = encode_snapshot(Snapshot("w0", worker.generation, seq, tuple(runs)))
            await one.client.set(one.keys.snapshot("w0", worker.generation), snapshot)
            await xadd(one, "w0", f"{seq}-0", encode_batch(EventBatch("w0", worker.generation, seq, (run,))))
            lease = worker.lease()
            lease.heartbeat, lease.cache.last_seq, lease.cache.resident_hashes = seq, seq, len(runs)
            await one.client.set(one.keys.replica("w0"), lease.SerializeToString())
            await one.client.zadd(one.keys.replicas, {"w0": seq})
            await one.look()
            await asyncio.sleep(0.005)
        await until(lambda: one.mirror.applied_seq("w0") == 200)
        assert one.num_batches("contradicted") >= 40
        assert one.metrics.index_resyncs._value.get() <= 1 + (time.monotonic() - started_s) / 10


def large_runs() -> tuple[Stored, ...]:
    """Each is a part of its own."""
    keys = random.Random(2)
    return tuple(Stored(0, array("Q", [keys.getrandbits(64) | 1 for _ in range(48)])) for _ in range(40))


async def test_while_a_large_snapshot_is_taken_in_all_else_goes_on_and_then_it_stands_at_once(redis_url: str) -> None:
    index = HeldUpIndex(part_blocks=40)
    index.may_go_on = True
    async with mirrored(redis_url, "large", index=index) as one:
        worker, other = await one.boot("w0"), await one.boot("w1")
        one.ask("w0", [1] * BLOCK)
        await one.settle()
        index.has_begun = index.may_go_on = False
        # Events 2 to 101 get lost; what they told is in the snapshot.
        runs = large_runs()
        snapshot = encode_snapshot(Snapshot("w0", worker.generation, 101, runs))
        await one.client.set(one.keys.snapshot("w0", worker.generation), snapshot)
        for seq, tokens in ((102, [2] * BLOCK), (103, [3] * BLOCK)):
            event = Stored(0, worker.scheme.keys(tokens))
            await xadd(one, "w0", f"{seq}-0", encode_batch(EventBatch("w0", worker.generation, seq, (event,))))
            await until(lambda: index.has_begun)
        one.ask("w1", [1] * BLOCK)
        await other.report_events()
        await until(lambda: one.mirror.applied_seq("w1") == 1)
        await until(lambda: one.mirror.applied_seq("w0") == 103)
        await until(lambda: len(index) > 20 * 48)
        assert index.num_blocks("w0") == 3, "the old one, and those of the events after the hole"
        assert not index.match(runs[0].keys)
        index.may_go_on = True
        await until(lambda: index.num_blocks("w0") == 40 * 48 + 2)
        assert one.mirror.applied_seq("w0") == 103, "the events after the snapshot were read again"
        assert (one.num_batches("gap"), one.metrics.index_resyncs._value.get()) == (1, 1)
        await until(lambda: len(index) == 40 * 48 + 3)
        index.check_invariants()


async def test_a_replica_that_leaves_while_its_snapshot_is_taken_in_leaves_nothing(redis_url: str) -> None:
    index = HeldUpIndex(part_blocks=40)
    async with mirrored(redis_url, "leaves", index=index) as one:
        for generation in ("g1", "g2"):
            snapshot = encode_snapshot(Snapshot("w0", generation, 5, large_runs()))
            await one.client.set(one.keys.snapshot("w0", generation), snapshot)
        one.mirror.follow("w0", "g1")
        await until(lambda: len(index) > 20 * 48)
        assert index.num_blocks("w0") == 0
        one.mirror.forget("w0")
        one.mirror.follow("w0", "g2")  # it came back
        index.may_go_on = True
        await until(lambda: index.num_blocks("w0") > 0)
        assert (index.generation("w0"), index.num_blocks("w0")) == ("g2", 40 * 48)
        one.mirror.forget("w0")
        await until(lambda: len(index) == 0)
        index.check_invariants()


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_snapshot_whose_end_is_bad_is_not_taken_in(redis_url: str, is_known: bool) -> None:
    async with mirrored(redis_url, f"bad-end-{is_known}") as one:
        worker = await one.boot("w0")
        one.ask("w0", [1] * BLOCK)
        if is_known:
            await one.settle()
        else:
            await worker.report()
        runs = tuple(Stored(0, array("Q", range(first, first + 48))) for first in range(48, 4848, 48))
        data = encode_snapshot(Snapshot("w0", worker.generation, 300, runs))
        await one.client.set(one.keys.snapshot("w0", worker.generation), data[:-8])
        late = EventBatch("w0", worker.generation, 200, (Stored(0, worker.scheme.keys([2] * BLOCK)),))
        await xadd(one, "w0", "200-0", encode_batch(late))
        await one.look()
        await until(lambda: one.metrics.index_bad_events._value.get() >= 1)
        await until(lambda: one.mirror.applied_seq("w0") == 200)
        assert one.mirror.index.num_blocks("w0") == 2
        await until(lambda: len(one.mirror.index) == 2)


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
        await until(lambda: one.mirror.was_loaded)
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


async def test_a_miss_heals_an_index_that_is_wrong_and_holds_as_many_blocks_as_the_replica(cluster: Cluster) -> None:
    """Neither numbers nor counts can tell. The miss does: it brings blocks that stand in the index already."""
    worker = await cluster.add_worker("w0", num_blocks=26, heartbeat_s=1000, lease_s=1000)
    router = await cluster.add_router()
    index, scheme = router.fleet.index, worker.scheme

    async def ask(token: int) -> tuple[int, int]:
        """Blocks that were predicted, and found."""
        response = await cluster.http.post("/v1/completions", json={"prompt": [token] * 200, "max_tokens": 2})
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(response.headers["x-warmfront-matched-tokens"]) // 16, cached // 16

    def depths() -> list[int]:
        return [index.match(scheme.keys([token] * 200)).get("w0", (0, 0))[0] for token in (1, 2, 3, 4)]

    assert await ask(1) == await ask(2) == (0, 0)
    await until(lambda: depths() == [12, 12, 0, 0])
    wrong = Snapshot(
        "w0", worker.generation, worker.cache.last_seq, tuple(Stored(0, scheme.keys([token] * 200)) for token in (3, 4))
    )
    index.drop("w0")
    index.load("w0", wrong)
    assert await ask(3) == (12, 0)
    await worker.report()
    await until(lambda: router.fleet.mirror.applied_seq("w0") == worker.cache.last_seq)
    assert cluster.index_is_true(), "by its count: what came has pushed out as much of what was not known of"
    end = time.monotonic() + 20
    while depths() != [0, 12, 12, 0]:
        assert time.monotonic() < end, depths()
        await worker.report()
        await asyncio.sleep(0.02)
    metrics = (await cluster.http.get("/metrics")).text
    assert 'warmfront_router_index_batches_total{outcome="contradicted"} 1.0' in metrics
    assert "warmfront_router_index_resyncs_total 1.0" in metrics


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
