"""Keeps the prefix index in this process equal to the replicas' caches, from what they write to Redis.

Each replica generation is one feed: its snapshot, then its stream of numbered event batches after it. Four things can
go wrong, and each ends in a fresh snapshot: a gap in the numbers, a stream that was cut too short, an event that never
arrived, a count that differs. The last two show when the replica's lease, which tells its last number and its block
count, is compared with the index (``audit``), so that even an idle replica heals within a heartbeat.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError
from warmfront_pb.v1 import common_pb2

from cache.events import EventBatch, EventDecodeError, Malformed, Snapshot, decode_batch, decode_snapshot
from cache.prefix_index import Outcome, PrefixIndex
from router.metrics import RouterMetrics
from router.registry import FleetKeys

log = logging.getLogger(__name__)

_FIELD = b"b"
_READ_COUNT = 256  # batches of one stream per read
_READ_BLOCK_MS = 100  # also how late a new feed is noticed
_MAX_LOADS_AT_ONCE = 4
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_ENOUGH_TRIES = 5  # a router whose Redis never holds a snapshot serves all the same
_MAX_SKIPPED_EVENTS = 1 << 16


@dataclass(slots=True)
class _Feed:
    replica: str
    generation: str
    is_live: bool = False  # loaded, and the stream joins on as far as is known
    load_at_s: float = 0.0  # when to read the snapshot, while it is not live
    num_tries: int = 0  # loads since it was last seen to be right
    num_reads: int = 0  # completed reads of the stream while live
    num_bad_events: int = 0
    behind: tuple[int, int] | None = None  # (events applied, reads) when the lease was first ahead of the index


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
        return all(feed.num_reads or feed.num_tries >= _ENOUGH_TRIES for feed in self._feeds.values())

    @property
    def mode(self) -> str:
        """``live``; ``snapshot`` while one is being loaded; ``local`` while Redis is away."""
        if not self.online:
            return "local"
        return "live" if all(feed.is_live for feed in self._feeds.values()) else "snapshot"

    def audit(self, lease: common_pb2.ReplicaLease) -> None:
        """Compare what a lease says of the cache with the index; ask for a snapshot when it can only be wrong."""
        feed = self._feeds.get(lease.replica)
        if feed is None or feed.generation != lease.generation or not feed.is_live:
            return
        applied = self.index.last_seq(lease.replica)
        if lease.cache.last_seq > applied:
            # The events stood in the stream before the lease was written. A whole read later they are lost.
            if feed.behind is None or feed.behind[0] != applied:
                feed.behind = (applied, feed.num_reads)
            elif feed.num_reads > feed.behind[1] + 1:
                self._resync(feed, f"events {applied + 1} to {lease.cache.last_seq} never came")
            return
        feed.behind = None
        if lease.cache.last_seq == applied:
            held = self.index.num_blocks(lease.replica)
            if held != lease.cache.resident_hashes:
                self._resync(feed, f"the index holds {held} blocks, the replica {lease.cache.resident_hashes}")
            else:
                feed.num_tries = 0

    async def run(self) -> None:
        """Load, read and apply until stopped. Goes on by itself when Redis comes back."""
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                await self._load_due()
                await self._read_streams()
                self.online = True
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError) as error:
                if self.online:
                    log.warning("index is not updated, redis is away error=%r", str(error))
                self.online = False
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, 1.0)

    async def _load_due(self) -> None:
        now = time.monotonic()
        due = [feed for feed in self._feeds.values() if not feed.is_live and feed.load_at_s <= now]
        due.sort(key=lambda feed: feed.load_at_s)
        await asyncio.gather(*(self._load(feed) for feed in due[:_MAX_LOADS_AT_ONCE]))

    async def _load(self, feed: _Feed) -> None:
        data: Any = await self._client.get(self._keys.snapshot(feed.replica, feed.generation))
        if self._feeds.get(feed.replica) is not feed:
            return
        feed.num_tries += 1
        is_known = self.index.generation(feed.replica) == feed.generation
        if data is None:
            if is_known:  # it will be written again; until then the index is the best there is
                self._retry_later(feed)
                return
            snapshot = Snapshot(feed.replica, feed.generation, 0, ())  # a stream from event 1 on needs no other
        else:
            try:
                snapshot = decode_snapshot(data)
            except EventDecodeError as error:
                self._metrics.index_bad_events.inc()
                self._retry_later(feed)
                log.warning("bad snapshot replica=%s error=%r", feed.replica, str(error))
                return
        if is_known and snapshot.seq < self.index.last_seq(feed.replica):
            self.index.drop(feed.replica)  # go back, and forward again by the stream
        self.index.load(feed.replica, snapshot)
        feed.is_live = True
        feed.behind = None
        self._applied(feed)

    async def _read_streams(self) -> None:
        feeds = {self._keys.events(f.replica, f.generation).encode(): f for f in self._feeds.values() if f.is_live}
        if not feeds:
            await asyncio.sleep(_READ_BLOCK_MS / 1000)
            await self._client.ping()
            return
        cursors: Any = {stream: f"{self.index.last_seq(feed.replica)}-0" for stream, feed in feeds.items()}
        reply: Any = await self._client.xread(cursors, count=_READ_COUNT, block=_READ_BLOCK_MS)
        for stream, entries in reply or ():
            feed = feeds[stream]
            if self._feeds.get(feed.replica) is not feed:
                continue
            for entry_id, fields in entries:
                if feed.is_live:
                    self._take(feed, entry_id, fields)
            self._applied(feed)
        for feed in feeds.values():
            if feed.is_live:
                feed.num_reads += 1

    def _take(self, feed: _Feed, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        applied = self.index.last_seq(feed.replica)
        try:
            batch = decode_batch(fields[_FIELD])
            if (batch.replica, batch.generation) != (feed.replica, feed.generation):
                raise EventDecodeError(f"it is of {batch.replica!r} generation {batch.generation!r}")
        except (KeyError, EventDecodeError) as error:
            log.warning("bad event batch replica=%s entry=%s error=%r", feed.replica, entry_id.decode(), str(error))
            missing = int(entry_id.split(b"-")[0]) - applied
            if not 0 < missing <= _MAX_SKIPPED_EVENTS:
                self._metrics.index_bad_events.inc()
                self._resync(feed, "a bad batch with a number out of reach")
                return
            # It is skipped with the numbers it took; what it told is put right by the next audit.
            bad = Malformed(str(error))
            batch = EventBatch(feed.replica, feed.generation, applied + 1, (bad,) * missing)
        outcome = self.index.apply(feed.replica, batch)
        if outcome is Outcome.GAP:
            self._metrics.index_gaps.inc()
            self._resync(feed, f"events {applied + 1} to {batch.first_seq - 1} are missing")
        bad_events = self.index.num_bad_events(feed.replica)
        if bad_events > feed.num_bad_events:
            self._metrics.index_bad_events.inc(bad_events - feed.num_bad_events)
        feed.num_bad_events = bad_events

    def _applied(self, feed: _Feed) -> None:
        self._metrics.index_blocks.labels(feed.replica).set(self.index.num_blocks(feed.replica))
        self._on_applied(feed.replica, self.index.last_seq(feed.replica))

    def _resync(self, feed: _Feed, reason: str) -> None:
        """Read the snapshot again. What stands in the index stays until then: stale is better than nothing."""
        self._metrics.index_resyncs.inc()
        log.warning("index resync replica=%s generation=%s reason=%r", feed.replica, feed.generation, reason)
        feed.is_live = False
        self._retry_later(feed)

    def _retry_later(self, feed: _Feed) -> None:
        delay_s = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(feed.num_tries, 8))
        feed.load_at_s = time.monotonic() + delay_s * self._rng.uniform(0.5, 1.5)
