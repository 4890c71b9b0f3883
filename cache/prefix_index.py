"""The router's view of all caches: how many leading blocks of a prompt each replica holds.

May be stale, is never needed for correctness. It takes each replica's snapshot and the numbered events after it,
skips what it has seen, and says when something is missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from cache.events import Cleared, EventBatch, Removed, ReplicaId, Snapshot, Stored, Tier


class Depths(NamedTuple):
    """Leading blocks a replica holds: ``device`` of them on its device, ``total`` of them in any tier."""

    device: int
    total: int


class Outcome(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    STALE = "stale"
    """All of it was known, or it comes from a generation that has gone."""
    GAP = "gap"
    """Something before it is missing: nothing was applied, load a snapshot."""


class _Replica:
    __slots__ = ("generation", "keys", "num_bad_events", "seq")

    def __init__(self, generation: str, seq: int) -> None:
        self.generation = generation
        self.seq = seq
        self.keys: dict[int, int] = {}
        self.num_bad_events = 0


_MAX_REMEMBERED_DROPS = 4096


class PrefixIndex:
    """Which replica holds which blocks, by tier. One thread owns it."""

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._dropped: dict[ReplicaId, str] = {}

    def match(self, keys: array[int]) -> Mapping[ReplicaId, Depths]:
        """Leading blocks of ``keys`` each replica holds; replicas that hold none are absent."""
        depths: dict[ReplicaId, Depths] = {}
        for replica, state in self._replicas.items():
            held = state.keys
            total = 0
            device: int | None = None
            for key in keys:
                tiers = held.get(key, 0)
                if not tiers:
                    break
                if device is None and not tiers & 1 << Tier.DEVICE:
                    device = total
                total += 1
            if total:
                depths[replica] = Depths(total if device is None else device, total)
        return depths

    def load(self, replica: ReplicaId, snapshot: Snapshot) -> None:
        """Replace all that is known of a replica. A snapshot older than what stands here is ignored."""
        known = self._replicas.get(replica)
        if known and (snapshot.generation, snapshot.seq) < (known.generation, known.seq):
            return
        state = self._replicas[replica] = _Replica(snapshot.generation, snapshot.seq)
        self._dropped.pop(replica, None)
        for run in snapshot.runs:
            self._store(state, run)

    def apply(self, replica: ReplicaId, batch: EventBatch) -> Outcome:
        """Apply the events not seen yet.

        Generations sort by age. A batch of an older one, or of one that was dropped, is ``STALE``; the first batch
        (event 1) of a new one replaces what was known; anything else that does not join on is a ``GAP``. One bad
        event is counted and skipped.
        """
        state = self._replicas.get(replica)
        if batch.generation <= self._dropped.get(replica, "") and state is None:
            return Outcome.STALE
        if state is None or batch.generation > state.generation:
            if batch.first_seq != 1:
                return Outcome.GAP
            state = self._replicas[replica] = _Replica(batch.generation, 0)
        elif batch.generation < state.generation or batch.last_seq <= state.seq:
            return Outcome.STALE
        elif batch.first_seq > state.seq + 1:
            return Outcome.GAP
        for event in batch.events[state.seq + 1 - batch.first_seq :]:
            if isinstance(event, Stored):
                self._store(state, event)
            elif isinstance(event, Removed):
                self._remove(state, event)
            elif isinstance(event, Cleared):
                state.keys.clear()
            else:
                state.num_bad_events += 1
        state.seq = batch.last_seq
        return Outcome.APPLIED

    def drop(self, replica: ReplicaId) -> None:
        """The replica has gone: forget it, and let no late event of that generation bring it back.

        ``load`` takes it in again.
        """
        state = self._replicas.pop(replica, None)
        if state is not None:
            self._dropped.pop(replica, None)
            self._dropped[replica] = state.generation
            if len(self._dropped) > _MAX_REMEMBERED_DROPS:
                del self._dropped[next(iter(self._dropped))]

    def num_blocks(self, replica: ReplicaId) -> int:
        """Blocks the replica holds in any tier; 0 for one that is not known."""
        state = self._replicas.get(replica)
        return len(state.keys) if state else 0

    def last_seq(self, replica: ReplicaId) -> int:
        """The number of the last event applied; 0 for a replica that is not known."""
        state = self._replicas.get(replica)
        return state.seq if state else 0

    def generation(self, replica: ReplicaId) -> str | None:
        """The generation whose blocks stand here."""
        state = self._replicas.get(replica)
        return state.generation if state else None

    def num_bad_events(self, replica: ReplicaId) -> int:
        """Events of this replica that made no sense and were skipped."""
        state = self._replicas.get(replica)
        return state.num_bad_events if state else 0

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. For tests."""
        for state in self._replicas.values():
            assert all(state.keys.values())
        assert not self._dropped.keys() & self._replicas.keys()

    @staticmethod
    def _store(state: _Replica, run: Stored) -> None:
        bit = 1 << run.tier
        for key in run.keys:
            state.keys[key] = state.keys.get(key, 0) | bit

    @staticmethod
    def _remove(state: _Replica, event: Removed) -> None:
        bit = 1 << event.tier
        for key in event.keys:
            tiers = state.keys.get(key, 0) & ~bit
            if tiers:
                state.keys[key] = tiers
            else:
                state.keys.pop(key, None)
