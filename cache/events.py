"""What a replica reports of its cache, and the bytes in which it is reported.

Events tell logical residency: ``Stored`` when the first copy of a block appears in a tier, ``Removed`` when the last
copy goes, ``Cleared`` when all go at once. They are numbered one by one without a gap; a batch states the number of
its first. Applying an event twice, or removing what is not there, changes nothing. A snapshot is what is resident at
one sequence number, as ``Stored`` runs in chain order: every parent comes before its children.

Bytes (little-endian). A batch::

    u8 version = 1, u8 "B", u16 length + replica, u16 length + generation, u64 first_seq, u32 number of events,
    then per event  u32 length of the rest, u8 kind, u8 tier, u8 reason, u8 zero, and by kind
        1 stored    u64 parent key (0: the root), u64 key ...
        2 removed   u64 key ...
        3 cleared

A snapshot is the same with "S", ``seq`` in the place of ``first_seq``, and events of kind 1 only. The length lets a
reader skip one bad event, or one of a kind it does not know, and keep the rest.
"""

from __future__ import annotations

import itertools
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cache.block_hash import ROOT_KEY

ReplicaId: TypeAlias = str

_VERSION = 1
_BATCH, _SNAPSHOT = ord("B"), ord("S")
_STORED, _REMOVED, _CLEARED = 1, 2, 3
_PREAMBLE = struct.Struct("<BB")
_LENGTH = struct.Struct("<H")
_NUMBERS = struct.Struct("<QI")
_EVENT = struct.Struct("<IBBBB")
_EVENT_LENGTH = struct.Struct("<I")
_KEY_BYTES = 8


class EventDecodeError(ValueError):
    """These bytes are no batch or snapshot of a version that is understood here."""


class Tier(IntEnum):
    """Where a block lies; a lower number is nearer to the model."""

    DEVICE = 0
    HOST = 1


class RemovalReason(IntEnum):
    """Why the last copy of a block left a tier."""

    EVICTED = 1
    DEMOTED = 2
    INVALIDATED = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """``keys`` follow one another in a chain and came to ``tier``; ``parent`` is before the first (0: the root)."""

    parent: int
    keys: array[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of each of ``keys`` left ``tier``."""

    keys: array[int]
    reason: RemovalReason = RemovalReason.EVICTED
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached in any tier."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A place in a batch whose bytes made no sense; it keeps its number, so that its neighbours keep theirs."""

    error: str


Event: TypeAlias = Stored | Removed | Cleared | Malformed


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events number ``first_seq``, ``first_seq + 1`` and so on of one generation of one replica."""

    replica: ReplicaId
    generation: str
    first_seq: int
    events: tuple[Event, ...]

    @property
    def last_seq(self) -> int:
        """The number of the last event."""
        return self.first_seq + len(self.events) - 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is resident after event number ``seq``: runs in chain order, each parent before its children."""

    replica: ReplicaId
    generation: str
    seq: int
    runs: tuple[Stored, ...]

    @property
    def num_blocks(self) -> int:
        """Resident blocks, counted once per tier."""
        return sum(len(run.keys) for run in self.runs)


def encode_batch(batch: EventBatch) -> bytes:
    """The bytes of a batch (the module's head describes them)."""
    return _encode(_BATCH, batch.replica, batch.generation, batch.first_seq, batch.events)


def decode_batch(data: bytes) -> EventBatch:
    """The batch; a bad event in it becomes ``Malformed``. ``EventDecodeError`` when the frame itself is bad."""
    replica, generation, first_seq, events = _decode(_BATCH, data)
    return EventBatch(replica, generation, first_seq, tuple(events))


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of a snapshot (the module's head describes them)."""
    return _encode(_SNAPSHOT, snapshot.replica, snapshot.generation, snapshot.seq, snapshot.runs)


def decode_snapshot(data: bytes) -> Snapshot:
    """The snapshot. ``EventDecodeError`` when anything in it is bad: half a snapshot would be a wrong one."""
    replica, generation, seq, runs = read_snapshot(data)
    return Snapshot(replica, generation, seq, tuple(runs))


def read_snapshot(data: bytes) -> tuple[ReplicaId, str, int, Iterator[Stored]]:
    """The same one by one: replica, generation, sequence number, and the runs as they are asked for.

    ``EventDecodeError``, here or from the runs, when anything in it is bad.
    """
    replica, generation, seq, events = _decode(_SNAPSHOT, data)
    return replica, generation, seq, map(_stored_alone, events)


def chain_runs(
    keys: npt.NDArray[np.uint64], parent_keys: npt.NDArray[np.uint64], tier: Tier = Tier.DEVICE
) -> list[Stored]:
    """Blocks in any order as the runs of a snapshot: each as long as its blocks have one child, parents first.

    A block whose parent is not among the keys (the root, or in another tier) begins a run. Time of a sort.
    """
    if not keys.size:
        return []
    order = np.argsort(keys)
    keys, parent_keys = keys[order], parent_keys[order]
    parents = np.searchsorted(keys, parent_keys)
    parents[(parent_keys == ROOT_KEY) | (keys[np.minimum(parents, keys.size - 1)] != parent_keys)] = -1
    num_children = np.bincount(parents[parents >= 0], minlength=keys.size + 1)
    follows = (parents >= 0) & (num_children[parents] == 1)
    next_of = np.full(keys.size, -1)
    next_of[parents[follows]] = np.flatnonzero(follows)
    following = next_of.tolist()
    heads_after: dict[int, list[int]] = {}
    for head in np.flatnonzero(~follows).tolist():
        heads_after.setdefault(int(parents[head]), []).append(head)
    runs: list[Stored] = []
    heads = heads_after.get(-1, [])
    while heads:
        run = [heads.pop()]
        while (block := following[run[-1]]) >= 0:
            run.append(block)
        runs.append(Stored(int(parent_keys[run[0]]), array("Q", keys[run].tobytes()), tier))
        heads += heads_after.get(run[-1], ())
    return runs


def stored_runs(
    keys: npt.NDArray[np.uint64], parent_keys: npt.NDArray[np.uint64], tier: Tier = Tier.DEVICE
) -> list[Stored]:
    """Blocks, each after the one it follows if that is among them, as events: neighbours that follow one another."""
    if not keys.size:
        return []
    borders = [0, *(np.flatnonzero(parent_keys[1:] != keys[:-1]) + 1).tolist(), keys.size]
    return [
        Stored(int(parent_keys[start]), array("Q", keys[start:end].tobytes()), tier)
        for start, end in itertools.pairwise(borders)
    ]


def _encode(kind: int, replica: str, generation: str, seq: int, events: Iterable[Event]) -> bytes:
    bodies = [_encode_event(event) for event in events]
    parts = [_PREAMBLE.pack(_VERSION, kind)]
    for name in (replica.encode(), generation.encode()):
        parts += (_LENGTH.pack(len(name)), name)
    parts.append(_NUMBERS.pack(seq, len(bodies)))
    return b"".join(parts + bodies)


def _encode_event(event: Event) -> bytes:
    if isinstance(event, Stored):
        payload = event.parent.to_bytes(_KEY_BYTES, "little") + _key_bytes(event.keys)
        kind, tier, reason = _STORED, int(event.tier), 0
    elif isinstance(event, Removed):
        payload = _key_bytes(event.keys)
        kind, tier, reason = _REMOVED, int(event.tier), int(event.reason)
    elif isinstance(event, Cleared):
        payload, kind, tier, reason = b"", _CLEARED, 0, 0
    else:
        raise ValueError(f"a malformed event cannot be sent on: {event.error}")
    return _EVENT.pack(_EVENT.size - 4 + len(payload), kind, tier, reason, 0) + payload


def _decode(kind: int, data: bytes) -> tuple[str, str, int, Iterator[Event]]:
    try:
        version, found = _PREAMBLE.unpack_from(data)
        if version != _VERSION or found != kind:
            raise EventDecodeError(f"version {version} kind {chr(found)!r}, expected {_VERSION} {chr(kind)!r}")
        at = _PREAMBLE.size
        names = []
        for _ in range(2):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            names.append(data[at : at + length].decode())
            at += length
        seq, count = _NUMBERS.unpack_from(data, at)
    except (struct.error, UnicodeDecodeError) as error:
        raise EventDecodeError(str(error)) from error
    return names[0], names[1], seq, _decode_events(data, at + _NUMBERS.size, count)


def _decode_events(data: bytes, at: int, count: int) -> Iterator[Event]:
    for number in range(count):
        if at + _EVENT_LENGTH.size > len(data):
            raise EventDecodeError(f"event {number} of {count} begins at byte {at} of {len(data)}")
        (length,) = _EVENT_LENGTH.unpack_from(data, at)
        end = at + _EVENT_LENGTH.size + length
        if end > len(data):
            raise EventDecodeError(f"event {number} of {count} ends at byte {end} of {len(data)}")
        yield _decode_event(data, at, end)
        at = end
    if at != len(data):
        raise EventDecodeError(f"{len(data) - at} bytes are left over")


def _stored_alone(event: Event) -> Stored:
    if not isinstance(event, Stored):
        raise EventDecodeError("a snapshot holds something other than stored runs")
    return event


def _decode_event(data: bytes, at: int, end: int) -> Event:
    if end - at < _EVENT.size:
        return Malformed(f"{end - at} bytes are no event")
    _, kind, tier_number, reason_number, _ = _EVENT.unpack_from(data, at)
    payload = data[at + _EVENT.size : end]
    if len(payload) % _KEY_BYTES:
        return Malformed(f"{len(payload)} bytes are no whole number of keys")
    try:
        tier = Tier(tier_number)
        if kind == _STORED:
            if len(payload) < _KEY_BYTES:
                return Malformed("a stored event without a parent")
            return Stored(int.from_bytes(payload[:_KEY_BYTES], "little"), _keys(payload[_KEY_BYTES:]), tier)
        if kind == _REMOVED:
            return Removed(_keys(payload), RemovalReason(reason_number), tier)
    except ValueError as error:
        return Malformed(str(error))
    if kind == _CLEARED and not payload:
        return Cleared()
    return Malformed(f"unknown kind {kind}")


def _key_bytes(keys: array[int]) -> bytes:
    if sys.byteorder == "little":
        return keys.tobytes()
    swapped = array("Q", keys)
    swapped.byteswap()
    return swapped.tobytes()


def _keys(data: bytes) -> array[int]:
    keys = array("Q", data)
    if sys.byteorder != "little":
        keys.byteswap()
    return keys
