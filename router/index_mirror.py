"""Keeps the prefix index in this process equal to the replicas' caches, from what they write to Redis.

Each replica generation is one feed: its snapshot, then its stream of numbered event batches after it. What can go
wrong shows as a gap in the numbers, as events that contradict what stands here or, by the lease, which tells the
replica's last number and its block count, as events that never came or a count that differs (``audit``); so even an
idle replica's lost event heals within a heartbeat. Then a snapshot from after the hole is needed. If the one in Redis
is older, the replica is asked for a new one; until it stands the events after the hole are applied all the same: stale
is better than nothing. A snapshot of many blocks is taken in by parts, with requests and other replicas' events in
between, and then stands all at once; its stream is read again from its number on.

Somebody else's events in a stream are found out by their numbers too: the replica's leases do not reach them.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError, ResponseError
from warmfront_pb.v1 import common_pb2

from cache.events import EventDecodeError, Malformed, Stored, Tier, decode_batch, read_snapshot
from cache.prefix_index import Outcome, PrefixIndex
from common.redis_client import Line
from common.redis_keys import FleetKeys, is_wrong_type, wrong_types
from router.metrics import REFUSED, RouterMetrics

log = logging.getLogger(__name__)

_FIELD, _MADE_MS = b"b", b"t"
_READ_COUNT = 256  # batches of one stream per read
_READ_BLOCK_MS = 100  # also how late a feed's stream is first read
_READ_BLOCK_SOON_MS = 5  # while a feed waits for that, or may have lost events
_LOAD_PERIOD_S = 0.5  # between looks for snapshots that are needed, where nobody tells of any
_LEAST_LOAD_PAUSE_S = 0.002
_READ_PERIOD_S = 0.002  # batches that come closer together share a read, which costs more than they do
_MAX_LOADS_AT_ONCE = 8
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_FIRST_LOOK_S = 0.05  # between looks for a snapshot, until a worker that lives has written the one asked for
_QUICK_LOOKS = 8
_ENOUGH_TRIES = 13  # in about 3 s; a router whose Redis never holds a snapshot serves all the same
_MAX_GAP = 1 << 20  # events between two looks; a number beyond that is nobody's of ours
_STRANGE_AFTER_BEATS = 5  # of a replica that has not come as far as what stands in its stream
_FIRST_DOUBT_S, _LAST_DOUBT_S = 10.0, 600.0  # between snapshots for contradicting events: the engine may be at fault
_WANTED_MS = 10_000
_SKIP_S = 1.0


@dataclass(slots=True)
class _Ahead:
    """An event that stands in a stream, and the leases since, none of which knows of it."""

    seq: int
    heartbeat: int  # of the last one
    num_beats: int = 0


@dataclass(slots=True)
class _Feed:
    replica: str
    generation: str
    stream: bytes  # the key of its events
    is_loaded: bool = False  # its events are read and applied
    needed_seq: int | None = None  # something is missing before this number, a snapshot from there on is needed
    lease_seq: int = 0  # the replica's last event by its last lease
    load_at_s: float = 0.0  # when to look for that snapshot
    num_tries: int = 0  # such looks since the feed was last seen to be right
    num_reads: int = 0  # completed reads of the stream
    cursor: str = "0-0"  # the last entry read
    skipped_until_s: float = 0.0  # its stream's key holds something else
    is_told_of: bool = False  # that one of its keys does
    behind: tuple[int, int] | None = None  # (events applied, reads) when the lease was seen to be ahead of the index
    ahead: _Ahead | None = None
    strange_seq: int | None = None  # events from this number on are somebody else's, until a lease reaches it
    doubted_seq: int | None = None  # what stood here before this event was wrong
    doubt_at_s: float = 0.0  # when that may next be a reason for a snapshot
    doubt_pause_s: float = _FIRST_DOUBT_S

    @property
    def is_due(self) -> bool:
        return not self.is_loaded or self.needed_seq is not None


class IndexMirror:
    """Owns the index. ``on_applied(replica, seq)`` is told after events have been applied."""

    def __init__(
        self,
        client: redis_asyncio.Redis,
        keys: FleetKeys,
        index: PrefixIndex,
        metrics: RouterMetrics,
        on_applied: Callable[[str, int], None],
        rng: random.Random | None = None,
    ) -> None:
        self.index = index
        self.online = False
        # Whether at some time every replica's snapshot and the stream after it had been read, or tried often enough.
        self.was_loaded = False
        self._client = client
        self._line = Line(client)
        self._keys = keys
        self._metrics = metrics
        self._batches = {outcome: metrics.index_batches.labels(outcome.value) for outcome in Outcome}
        self._on_applied = on_applied
        self._rng = rng or random.Random()
        self._feeds: dict[str, _Feed] = {}
        self._is_stopped = False
        self._has_changed = asyncio.Event()  # a feed has come or gone, or needs a snapshot

    def stop(self) -> None:
        """Let ``run`` end, should it survive its cancellation."""
        self._is_stopped = True
        self._has_changed.set()

    def follow(self, replica: str, generation: str) -> None:
        """Mirror this generation from now on, and no other one of that replica."""
        feed = self._feeds.get(replica)
        if feed is not None and feed.generation == generation:
            return
        self.forget(replica)
        self._feeds[replica] = _Feed(replica, generation, self._keys.events(replica, generation).encode())
        self._has_changed.set()

    def forget(self, replica: str) -> None:
        """The replica has gone, and its blocks with it."""
        self._feeds.pop(replica, None)
        self.index.drop(replica)
        self._has_changed.set()
        self._metrics.drop_index(replica)

    def applied_seq(self, replica: str) -> int:
        """The number of the last event that stands in the index."""
        return self.index.last_seq(replica)

    @property
    def mode(self) -> str:
        """``live``; ``snapshot`` while one is waited for; ``local`` while Redis is away."""
        if not self.online:
            return "local"
        return "snapshot" if any(feed.is_due for feed in self._feeds.values()) else "live"

    def audit(self, lease: common_pb2.ReplicaLease) -> None:
        """Compare what a lease says of the cache with the index; ask for a snapshot when it can only be wrong."""
        feed = self._feeds.get(lease.replica)
        if feed is None or feed.generation != lease.generation:
            return
        applied = self.index.last_seq(lease.replica)
        last_seq = feed.lease_seq = lease.cache.last_seq
        self._look_for_strangers(feed, lease.heartbeat)
        if feed.is_due:
            return
        if feed.doubted_seq is not None and feed.doubt_at_s <= time.monotonic():
            feed.doubt_at_s = time.monotonic() + feed.doubt_pause_s
            feed.doubt_pause_s = min(2 * feed.doubt_pause_s, _LAST_DOUBT_S)
            self._need_snapshot(feed, feed.doubted_seq, f"event {feed.doubted_seq} contradicts what stood here")
            return
        if last_seq > applied:
            feed.behind = feed.behind or (applied, feed.num_reads)
            return
        feed.behind = None
        if last_seq < applied:
            return  # the lease is older than the last events
        held = [self.index.num_blocks(lease.replica, tier) for tier in Tier]
        resident = [lease.cache.resident_hashes, lease.cache.host_kv_blocks_cached]
        if held == resident:
            feed.num_tries = 0
        elif self.index.is_complete(lease.replica) or self.index.has_room(sum(resident) - sum(held)):
            reason = f"the index holds {held} blocks (device, host), the replica {resident}"
            self._need_snapshot(feed, applied, reason)

    def _look_for_loss(self, feed: _Feed) -> None:
        """What a lease tells of stood in the stream before it: a read begun since brings it, or it is lost."""
        assert feed.behind is not None
        applied, num_reads = self.index.last_seq(feed.replica), feed.behind[1] + 1  # one may have begun before
        if applied != feed.behind[0] or feed.is_due or not self._is_followed(feed):
            feed.behind = None  # where it goes on the next lease tells how far
        elif feed.num_reads > num_reads:
            feed.behind = None
            self._need_snapshot(feed, feed.lease_seq, f"events {applied + 1} to {feed.lease_seq} never came")

    def _look_for_strangers(self, feed: _Feed, heartbeat: int) -> None:
        """A replica writes its events before the next lease tells of them, so leases must soon reach what was read.

        Where none of several does, somebody else has written it: it is not believed any more.
        """
        if feed.strange_seq is not None and feed.lease_seq >= feed.strange_seq:
            feed.strange_seq = None
        if feed.ahead is not None and feed.lease_seq >= feed.ahead.seq:
            feed.ahead = None
        known = max(self.index.last_seq(feed.replica), feed.needed_seq or 0)
        if feed.lease_seq >= known or known == feed.strange_seq:  # that one is told of, and its snapshot wanted
            return
        if feed.ahead is None:
            feed.ahead = _Ahead(known, heartbeat)
        elif feed.ahead.heartbeat != heartbeat:
            feed.ahead.heartbeat = heartbeat
            feed.ahead.num_beats += 1
            if feed.ahead.num_beats >= _STRANGE_AFTER_BEATS:
                feed.strange_seq, feed.ahead, feed.needed_seq = feed.ahead.seq, None, None
                feed.num_tries = 0  # those until now were for what nobody has
                reason = f"the last event is {feed.lease_seq}, somebody else has written number {feed.strange_seq}"
                self._need_snapshot(feed, feed.lease_seq, reason)

    async def run(self) -> None:
        """Load, read and apply until stopped. Goes on by itself when Redis comes back."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_loading())
            tasks.create_task(self._keep_reading())

    async def _keep_reading(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                has_news = await self._read_streams()
                self.was_loaded = self.was_loaded or self._is_loaded()
                if has_news:
                    await asyncio.sleep(_READ_PERIOD_S)
                self.online = True
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError) as error:
                if self.online:
                    log.warning("index is not updated, redis is away error=%r", str(error))
                self.online = False
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, 1.0)

    async def _keep_loading(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._is_stopped:
            try:
                await self._load_due()
                pause_s = _FIRST_RETRY_S
            except (RedisError, OSError):  # the reading tells of it
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, 1.0)
            if self.index.sweep():
                await asyncio.sleep(0)
            else:
                await self._until_due()

    async def _until_due(self) -> None:
        """Until a snapshot is to be looked for, or somebody has come or gone."""
        self._has_changed.clear()
        next_s = min((feed.load_at_s for feed in self._feeds.values() if feed.is_due), default=math.inf)
        delay_s = min(max(_LEAST_LOAD_PAUSE_S, next_s - time.monotonic()), _LOAD_PERIOD_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._has_changed.wait()

    def _is_loaded(self) -> bool:
        feeds = self._feeds.values()
        return bool(feeds) and all(
            feed.num_tries >= _ENOUGH_TRIES or (feed.num_reads and not feed.is_due) for feed in feeds
        )

    async def _load_due(self) -> None:
        """Look for all snapshots that are needed now, several at once; they are taken in one after the other."""
        now = time.monotonic()
        due = [feed for feed in self._feeds.values() if feed.is_due and feed.load_at_s <= now]
        due.sort(key=lambda feed: feed.load_at_s)
        for first in range(0, len(due), _MAX_LOADS_AT_ONCE):
            some = due[first : first + _MAX_LOADS_AT_ONCE]
            for feed, data in zip(some, await asyncio.gather(*map(self._get_snapshot, some)), strict=True):
                await self._load(feed, data)

    async def _get_snapshot(self, feed: _Feed) -> Any:
        try:
            return await self._client.get(self._keys.snapshot(feed.replica, feed.generation))
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._bad_key(feed, "snapshot")
            return None

    async def _load(self, feed: _Feed, data: bytes | None) -> None:
        """Take the snapshot if it is from after what is missing; else ask the replica for a new one, and wait."""
        if not self._is_followed(feed):
            return
        feed.num_tries += 1
        opened = self._opened(feed, data)
        if opened is not None and await self._take_in(feed, *opened):
            return
        if not self._is_followed(feed):
            return
        if feed.is_loaded:
            await self._client.set(self._keys.wanted(feed.replica, feed.generation), b"1", px=_WANTED_MS)
            self._look_later(feed)
        else:
            # The stream may begin with event 1; if it does not, that shows as a gap.
            await self._take_in(feed, 0, iter(()))

    async def _take_in(self, feed: _Feed, seq: int, runs: Iterator[Stored]) -> bool:
        """Let this snapshot stand, unless it is bad or its feed has gone before its end, which nobody then notices.

        An older one than what stands here is a step back: the stream leads forward again.
        """
        parts = self.index.loading(feed.replica, feed.generation, seq, runs)
        try:
            for _ in parts:
                await asyncio.sleep(0)
                if not self._is_followed(feed):
                    return False
        except EventDecodeError as error:
            self._bad_snapshot(feed, error)
            return False
        finally:
            parts.close()
        feed.is_loaded = True
        feed.cursor = f"{seq}-0"
        feed.needed_seq = feed.doubted_seq = None
        feed.num_reads = 0
        feed.behind = feed.ahead = None
        self._metrics.index_bad_events.inc(self.index.num_bad_events(feed.replica))
        self._applied(feed)
        return True

    def _opened(self, feed: _Feed, data: bytes | None) -> tuple[int, Iterator[Stored]] | None:
        """A snapshot's number and its runs; None where it is none of this feed, or from before what is missing."""
        if data is None:
            return None
        try:
            replica, generation, seq, runs = read_snapshot(data)
            if (replica, generation) != (feed.replica, feed.generation):
                raise EventDecodeError(f"it is of {replica!r} generation {generation!r}")
            if feed.strange_seq is not None and seq >= feed.strange_seq:
                raise EventDecodeError(f"it stands at event {seq}, the replica at {feed.lease_seq}")
        except EventDecodeError as error:
            self._bad_snapshot(feed, error)
            return None
        return None if feed.is_loaded and seq < (feed.needed_seq or 0) else (seq, runs)

    def _bad_snapshot(self, feed: _Feed, error: EventDecodeError) -> None:
        self._metrics.index_bad_events.inc()
        log.warning("bad snapshot replica=%s error=%r", feed.replica, str(error))

    def _is_followed(self, feed: _Feed) -> bool:
        return self._feeds.get(feed.replica) is feed

    async def _read_streams(self) -> bool:
        """Wait a while for something new in any stream and take it in; whether anything came."""
        now = time.monotonic()
        is_soon = not all(feed.num_reads and feed.behind is None for feed in self._feeds.values())
        block_ms = _READ_BLOCK_SOON_MS if is_soon else _READ_BLOCK_MS
        feeds = {feed.stream: feed for feed in self._feeds.values() if feed.is_loaded and feed.skipped_until_s <= now}
        if not feeds:
            await asyncio.sleep(block_ms / 1000)
            await self._client.ping()
            return False
        cursors = {stream: feed.cursor for stream, feed in feeds.items()}
        try:
            reply = await self._line.read_streams(cursors, _READ_COUNT, block_ms)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            await self._skip_bad_streams(feeds)
            return False
        # Where a snapshot stands since, the stream is read again from there on.
        feeds = {stream: feed for stream, feed in feeds.items() if feed.cursor == cursors[stream]}
        for stream, entries in reply:
            feed = feeds.get(stream)
            if feed is None or not self._is_followed(feed):
                continue
            for entry_id, fields in entries:
                feed.cursor = entry_id.decode()
                self._take(feed, entry_id, fields)
            self._applied(feed)
            if feed.num_reads:  # what the first read finds may be old
                self._observe_lags(fields for _, fields in entries)
        for feed in feeds.values():
            feed.num_reads += 1
            if feed.behind is not None:
                self._look_for_loss(feed)
        return bool(reply)

    def _take(self, feed: _Feed, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        replica = feed.replica
        applied = self.index.last_seq(replica)
        try:
            batch = decode_batch(fields[_FIELD])
            if (batch.replica, batch.generation) != (replica, feed.generation):
                raise EventDecodeError(f"it is of {batch.replica!r} generation {batch.generation!r}")
            is_far = batch.first_seq > max(applied, feed.lease_seq) + _MAX_GAP
            if is_far or (feed.strange_seq is not None and batch.last_seq >= feed.strange_seq):
                raise EventDecodeError(f"it ends with event {batch.last_seq}, the replica stands at {feed.lease_seq}")
        except (KeyError, EventDecodeError) as error:
            log.warning("bad event batch replica=%s entry=%s error=%r", replica, entry_id.decode(), str(error))
            self._metrics.index_bad_events.inc()
            self._metrics.index_batches.labels(REFUSED).inc()
            return  # if it was one of the replica's, the next batch shows a gap, or its lease is ahead
        num_malformed = sum(isinstance(event, Malformed) for event in batch.events)
        if num_malformed:
            self._need_snapshot(feed, batch.last_seq, f"{num_malformed} bad events")
        num_bad = self.index.num_bad_events(replica)
        outcome = self.index.apply(replica, batch)
        self._batches[outcome].inc()
        if outcome is Outcome.GAP:
            self._metrics.index_gaps.inc()
            reason = f"events {applied + 1} to {batch.first_seq - 1} are missing"
            self._need_snapshot(feed, batch.first_seq - 1, reason)
            self.index.skip_to(replica, batch.first_seq - 1)
            self.index.apply(replica, batch)
        elif outcome is Outcome.CONTRADICTED:
            feed.doubted_seq = batch.last_seq
        self._metrics.index_bad_events.inc(self.index.num_bad_events(replica) - num_bad)

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

    def _applied(self, feed: _Feed) -> None:
        self._on_applied(feed.replica, self.index.last_seq(feed.replica))

    def _need_snapshot(self, feed: _Feed, seq: int, reason: str) -> None:
        if feed.needed_seq is None:
            self._metrics.index_resyncs.inc()
            log.warning("index resync replica=%s generation=%s reason=%r", feed.replica, feed.generation, reason)
            self._look_later(feed)
        feed.needed_seq = max(feed.needed_seq or 0, seq)

    def _look_later(self, feed: _Feed) -> None:
        """Jittered, so that many routers do not ask in one moment, and later each time."""
        delay_s = min(_LAST_RETRY_S, _FIRST_LOOK_S * 2 ** max(0, min(feed.num_tries - _QUICK_LOOKS, 8)))
        feed.load_at_s = time.monotonic() + delay_s * self._rng.uniform(0.5, 1.5)
        self._has_changed.set()
