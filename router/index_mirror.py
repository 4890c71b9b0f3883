"""Keeps the prefix index in this process equal to the replicas' caches, from what they write to Redis.

Each replica generation is one feed: its snapshot, then its stream of numbered event batches after it. What can go
wrong shows as a gap in the numbers or, by the lease, which tells the replica's last number and its block count, as
events that never came or a count that differs (``audit``); so even an idle replica's lost event heals within a
heartbeat. Then a snapshot from after the hole is needed. If the one in Redis is older, the replica is asked for a new
one; until it comes the events after the hole are applied all the same: stale is better than nothing.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError, ResponseError
from warmfront_pb.v1 import common_pb2

from cache.events import EventBatch, EventDecodeError, Malformed, Snapshot, Tier, decode_batch, decode_snapshot
from cache.prefix_index import Outcome, PrefixIndex
from common.redis_keys import is_wrong_type, wrong_types
from router.metrics import RouterMetrics
from router.registry import FleetKeys

log = logging.getLogger(__name__)

_FIELD, _MADE_MS = b"b", b"t"
_READ_COUNT = 256  # batches of one stream per read
_READ_BLOCK_MS = 100  # also how late a new feed is noticed
_READ_PERIOD_S = 0.002  # batches that come closer together share a read, which costs more than they do
_MAX_LOADS_AT_ONCE = 8
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_ENOUGH_TRIES = 5  # a router whose Redis never holds a snapshot serves all the same
_MAX_SKIPPED_EVENTS = 1 << 20
_WANTED_MS = 10_000
_SKIP_S = 1.0


@dataclass(slots=True)
class _Feed:
    replica: str
    generation: str
    is_loaded: bool = False  # its events are read and applied
    needed_seq: int = 0  # over 0: something is missing before this number, a snapshot from there on is needed
    load_at_s: float = 0.0  # when to look for that snapshot
    num_tries: int = 0  # such looks since the feed was last seen to be right
    num_reads: int = 0  # completed reads of the stream
    cursor: str = "0-0"  # the last entry read
    skipped_until_s: float = 0.0  # its stream's key holds something else
    is_told_of: bool = False  # that one of its keys does
    behind: tuple[int, int] | None = None  # (events applied, reads) when the lease was first ahead of the index

    @property
    def is_due(self) -> bool:
        return not self.is_loaded or self.needed_seq > 0


class IndexMirror:
    """Owns the index. ``on_applied(replica, seq)`` is told after events have been applied."""

    def __init__(
        self,
        client: "redis_asyncio.Redis",
        keys: FleetKeys,
        index: PrefixIndex,
        metrics: RouterMetrics,
        on_applied: Callable[[str, int], None],
        rng: random.Random | None = None,
    ) -> None:
        self.index = index
        self.online = False
        self._client = client
        self._keys = keys
        self._metrics = metrics
        self._on_applied = on_applied
        self._rng = rng or random.Random()
        self._feeds: dict[str, _Feed] = {}
        self._is_stopped = False

    def stop(self) -> None:
        """Let ``run`` end, should it survive its cancellation."""
        self._is_stopped = True

    def follow(self, replica: str, generation: str) -> None:
        """Mirror this generation from now on, and no other one of that replica."""
        feed = self._feeds.get(replica)
        if feed is not None and feed.generation == generation:
            return
        self.forget(replica)
        self._feeds[replica] = _Feed(replica, generation)

    def forget(self, replica: str) -> None:
        """The replica has gone, and its blocks with it."""
        self._feeds.pop(replica, None)
        self.index.drop(replica)
        self._metrics.drop_index(replica)

    def applied_seq(self, replica: str) -> int:
        """The number of the last event that stands in the index."""
        return self.index.last_seq(replica)

    def is_loaded(self) -> bool:
        """Whether every replica's snapshot and the stream after it have been read, or tried often enough."""
        return all(
            feed.num_tries >= _ENOUGH_TRIES or (feed.num_reads and not feed.needed_seq) for feed in self._feeds.values()
        )

    @property
    def mode(self) -> str:
        """``live``; ``snapshot`` while one is waited for; ``local`` while Redis is away."""
        if not self.online:
            return "local"
        return "snapshot" if any(feed.is_due for feed in self._feeds.values()) else "live"

    def audit(self, lease: common_pb2.ReplicaLease) -> None:
        """Compare what a lease says of the cache with the index; ask for a snapshot when it can only be wrong."""
        feed = self._feeds.get(lease.replica)
        if feed is None or feed.generation != lease.generation or feed.is_due:
            return
        applied = self.index.last_seq(lease.replica)
        last_seq = lease.cache.last_seq
        if last_seq > applied:
            # The lease may be a moment ahead of the stream. Two whole reads later its events are lost.
            if feed.behind is None or feed.behind[0] != applied:
                feed.behind = (applied, feed.num_reads)
            elif feed.num_reads > feed.behind[1] + 1:
                self._need_snapshot(feed, last_seq, f"events {applied + 1} to {last_seq} never came")
            return
        feed.behind = None
        if last_seq < applied:
            return  # the lease is older than the last events
        held = [self.index.num_blocks(lease.replica, tier) for tier in Tier]
        resident = [lease.cache.resident_hashes, lease.cache.host_kv_blocks_cached]
        if held == resident:
            feed.num_tries = 0
        else:
            reason = f"the index holds {held} blocks (device, host), the replica {resident}"
            self._need_snapshot(feed, applied, reason)

    async def run(self) -> None:
        """Load, read and apply until stopped. Goes on by itself when Redis comes back."""
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                are_more_due = await self._load_due()
                if await self._read_streams(1 if are_more_due else _READ_BLOCK_MS):
                    await asyncio.sleep(_READ_PERIOD_S)
                self.online = True
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError) as error:
                if self.online:
                    log.warning("index is not updated, redis is away error=%r", str(error))
                self.online = False
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, 1.0)

    async def _load_due(self) -> bool:
        """Look for some of the snapshots that are needed now; whether others are left."""
        now = time.monotonic()
        due = [feed for feed in self._feeds.values() if feed.is_due and feed.load_at_s <= now]
        due.sort(key=lambda feed: feed.load_at_s)
        await asyncio.gather(*(self._load(feed) for feed in due[:_MAX_LOADS_AT_ONCE]))
        return len(due) > _MAX_LOADS_AT_ONCE

    async def _load(self, feed: _Feed) -> None:
        """Take the snapshot if it is from after what is missing; else ask the replica for a new one, and wait."""
        data: Any = None
        try:
            data = await self._client.get(self._keys.snapshot(feed.replica, feed.generation))
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._bad_key(feed, "snapshot")
        if self._feeds.get(feed.replica) is not feed:
            return
        feed.num_tries += 1
        snapshot = self._decoded(feed, data)
        if feed.is_loaded and (snapshot is None or snapshot.seq < feed.needed_seq):
            await self._client.set(self._keys.wanted(feed.replica, feed.generation), b"1", px=_WANTED_MS)
            self._look_later(feed)
            return
        if snapshot is None:
            # The stream may begin with event 1; if it does not, that shows as a gap.
            snapshot = Snapshot(feed.replica, feed.generation, 0, ())
        # An older snapshot than what stands here is a step back: the stream leads forward again.
        self.index.drop(feed.replica)
        self.index.load(feed.replica, snapshot)
        feed.is_loaded = True
        feed.cursor = f"{snapshot.seq}-0"
        feed.needed_seq = 0
        feed.num_reads = 0
        feed.behind = None
        self._applied(feed)

    def _decoded(self, feed: _Feed, data: bytes | None) -> Snapshot | None:
        if data is None:
            return None
        try:
            snapshot = decode_snapshot(data)
            if (snapshot.replica, snapshot.generation) != (feed.replica, feed.generation):
                raise EventDecodeError(f"it is of {snapshot.replica!r} generation {snapshot.generation!r}")
            return snapshot
        except EventDecodeError as error:
            self._metrics.index_bad_events.inc()
            log.warning("bad snapshot replica=%s error=%r", feed.replica, str(error))
            return None

    async def _read_streams(self, block_ms: int) -> bool:
        """Read on in every stream; return when there was something new, or after ``block_ms``, and which."""
        now = time.monotonic()
        feeds = {
            self._keys.events(feed.replica, feed.generation).encode(): feed
            for feed in self._feeds.values()
            if feed.is_loaded and feed.skipped_until_s <= now
        }
        if not feeds:
            await asyncio.sleep(block_ms / 1000)
            await self._client.ping()
            return False
        cursors: Any = {stream: feed.cursor for stream, feed in feeds.items()}
        try:
            reply: Any = await self._client.xread(cursors, count=_READ_COUNT, block=block_ms)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            await self._skip_bad_streams(feeds)
            return False
        for stream, entries in reply or ():
            feed = feeds[stream]
            if self._feeds.get(feed.replica) is not feed:
                continue
            for entry_id, fields in entries:
                feed.cursor = entry_id.decode()
                self._take(feed, entry_id, fields)
            self._applied(feed)
            if feed.num_reads:  # what the first read finds may be old
                self._observe_lags(fields for _, fields in entries)
        for feed in feeds.values():
            feed.num_reads += 1
        return bool(reply)

    def _take(self, feed: _Feed, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            batch = decode_batch(fields[_FIELD])
            if (batch.replica, batch.generation) != (feed.replica, feed.generation):
                raise EventDecodeError(f"it is of {batch.replica!r} generation {batch.generation!r}")
        except (KeyError, EventDecodeError) as error:
            log.warning("bad event batch replica=%s entry=%s error=%r", feed.replica, entry_id.decode(), str(error))
            self._metrics.index_bad_events.inc()
            return  # if it was one of the replica's, the next batch shows a gap, or its lease is ahead
        bad_events = sum(isinstance(event, Malformed) for event in batch.events)
        if bad_events:
            self._metrics.index_bad_events.inc(bad_events)
            self._need_snapshot(feed, batch.last_seq, f"{bad_events} bad events")
        if self.index.apply(feed.replica, batch) is Outcome.GAP:
            self._metrics.index_gaps.inc()
            first = self.index.last_seq(feed.replica) + 1
            self._need_snapshot(feed, batch.first_seq - 1, f"events {first} to {batch.first_seq - 1} are missing")
            self._skip_to(feed, batch.first_seq - 1, "missing")
            self.index.apply(feed.replica, batch)

    async def _skip_bad_streams(self, feeds: dict[bytes, _Feed]) -> None:
        """Somebody wrote something else under a stream's key: its replica makes it anew, the others are read on."""
        bad = await wrong_types(self._client, {stream.decode(): "stream" for stream in feeds})
        for stream in bad:
            feed = feeds[stream.encode()]
            feed.skipped_until_s = time.monotonic() + _SKIP_S
            self._bad_key(feed, "events")

    def _bad_key(self, feed: _Feed, kind: str) -> None:
        self._metrics.redis_bad_keys.labels(kind).inc()
        if not feed.is_told_of:
            feed.is_told_of = True
            log.error("redis holds another type where %s should be replica=%s", kind, feed.replica)

    def _observe_lags(self, entries: Iterable[dict[bytes, bytes]]) -> None:
        """From the worker's making a batch to its standing in the index. Its clock and ours are not the same."""
        now_ms = time.time() * 1000
        for fields in entries:
            made_ms = fields.get(_MADE_MS, b"")
            if made_ms.isdigit():
                self._metrics.index_event_lag_seconds.observe(max(0.0, now_ms - int(made_ms)) / 1000)

    def _skip_to(self, feed: _Feed, seq: int, reason: str) -> None:
        """Go on after event ``seq`` as if what lies before it had said nothing."""
        applied = self.index.last_seq(feed.replica)
        if seq - applied > _MAX_SKIPPED_EVENTS:
            self.index.load(feed.replica, Snapshot(feed.replica, feed.generation, seq, ()))
        elif seq > applied:
            nothing = (Malformed(reason),) * (seq - applied)
            self.index.apply(feed.replica, EventBatch(feed.replica, feed.generation, applied + 1, nothing))

    def _applied(self, feed: _Feed) -> None:
        self._metrics.index_blocks.labels(feed.replica).set(self.index.num_blocks(feed.replica))
        self._on_applied(feed.replica, self.index.last_seq(feed.replica))

    def _need_snapshot(self, feed: _Feed, seq: int, reason: str) -> None:
        if not feed.needed_seq:
            self._metrics.index_resyncs.inc()
            log.warning("index resync replica=%s generation=%s reason=%r", feed.replica, feed.generation, reason)
            self._look_later(feed)
        feed.needed_seq = max(feed.needed_seq, seq, 1)

    def _look_later(self, feed: _Feed) -> None:
        """Jittered, so that many routers do not ask in one moment, and later each time."""
        delay_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(feed.num_tries, 8))
        feed.load_at_s = time.monotonic() + delay_s * self._rng.uniform(0.5, 1.5)
