"""Where each index key stands: a table of small buckets in flat memory, 16 bytes per slot.

A dict takes about 130 bytes per entry; a router holds millions. Index keys are hashes already, so their low bits
are the bucket, and a bucket is eight slots in any order, one line of a processor's cache. What does not fit into its
bucket (some per cent of a full table) stands in a dict beside it. Many keys go in and out at once by numpy, whole
buckets at a time, single ones by plain searches of the same memory.

It doubles and shrinks in place and little by little, some buckets with each call that changes it, so that no event
waits for it: bucket after bucket is split in two, by one more bit of its keys, or the last ones are merged into those
that they once came from (linear hashing, Litwin 1980). The memory is mapped anonymously: that can be made longer
without a copy, and takes no pages before they are written.
"""

from __future__ import annotations

import mmap
import sys
from array import array
from itertools import chain

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]

ABSENT = -1
_WIDTH, _WIDTH_BITS = 8, 3
_KEY_BYTES, _BUCKET_BYTES = 8, 64  # of keys; places take as much
_MIN_BUCKETS = 8
_BEYOND_BYTES = 8
"""Behind the last key: up to Python 3.11.4 a search reads a byte beyond its end (gh-105235), where no memory may be."""
_MOST, _FEWEST = 0.6, 0.1  # keys per slot: above it grows, below it shrinks
_STEP_PER_KEY = 2
"""Buckets that a call splits or merges beyond its step: so many that those still whole are not overfull meanwhile."""
_FEW = 12
"""Up to here one by one is quicker than numpy."""
_EMPTY = bytes(_KEY_BYTES)
_NONE = array("Q")
# The first free slot of a bucket by the byte that np.packbits makes of its slots; 8: none is free.
_FIRST_FREE = np.array([8 - bits.bit_length() for bits in range(256)], dtype=np.int64)


class KeyTable:
    """Key to place (a number from 0); ``ABSENT`` for keys that are not here.

    While it grows or shrinks each call splits or merges ``step_buckets``, and some more for each of its keys.
    """

    __slots__ = (
        "_fewest",
        "_has_spilled",
        "_key_cells",
        "_key_memory",
        "_keys",
        "_mask",
        "_most",
        "_num_buckets",
        "_place_cells",
        "_place_memory",
        "_places",
        "_rows",
        "_spill_memory",
        "_spilled",
        "_step",
        "_target",
        "_total",
    )

    def __init__(self, step_buckets: int = 8) -> None:
        self._step = step_buckets
        self._key_memory = _memory(_BUCKET_BYTES * _MIN_BUCKETS + _BEYOND_BYTES)
        self._place_memory = _memory(_BUCKET_BYTES * _MIN_BUCKETS)
        self._spill_memory = _memory(_MIN_BUCKETS)
        self._spilled: dict[int, array[int]] = {}  # by bucket: key, place, key, place ...
        self._total = 0
        self._num_buckets = _MIN_BUCKETS  # a power of two, but while it grows or shrinks
        self._view()
        self._turn_to(_MIN_BUCKETS)

    def __len__(self) -> int:
        return self._total

    @property
    def num_buckets(self) -> int:
        """How large it is: a power of two, or on the way to one."""
        return self._num_buckets

    @property
    def num_bytes(self) -> int:
        """Memory of the buckets, which is mapped, and about that of the dict."""
        return (2 * _BUCKET_BYTES + 1) * self._num_buckets + 180 * len(self._spilled)

    def find(self, key: int) -> int:
        """The place of one key."""
        bucket = self._bucket_of(key)
        slot = self._slot_in(bucket, key)
        if slot >= 0:
            return self._place_cells[slot]
        if bucket not in self._spilled:
            return ABSENT
        spilled = self._spilled[bucket]
        at = _position(spilled, key)
        return spilled[at + 1] if at >= 0 else ABSENT

    def num_absent(self, keys: array[int]) -> int:
        """How many of the leading ``keys`` are not here."""
        if len(keys) <= _FEW:
            for position, key in enumerate(keys):
                bucket = self._bucket_of(key)
                if self._slot_in(bucket, key) >= 0 or _position(self._spilled.get(bucket, _NONE), key) >= 0:
                    return position
            return len(keys)
        wanted = np.frombuffer(keys, dtype=np.uint64)
        found, buckets, _ = self._look_up(wanted)
        count = int(found[0]) if found.size else len(keys)
        for position, bucket in self._maybe_spilled(buckets, found):
            if position >= count:
                break
            if _position(self._spilled[bucket], keys[position]) >= 0:
                return position
        return count

    def insert_run(self, keys: array[int], first_place: int) -> None:
        """Add keys that are all different and not here, at places that count up from ``first_place``."""
        if self._total + len(keys) > self._most:
            self._turn_to(_num_buckets_for(self._total + len(keys)))
        if self._num_buckets != self._target:
            self._go_on(len(keys))
        if len(keys) <= _FEW:
            for place, key in enumerate(keys, first_place):
                self._insert(key, place)
        else:
            places = np.arange(first_place, first_place + len(keys), dtype=np.int64)
            self._insert_many(np.frombuffer(keys, dtype=np.uint64), places)

    def delete_many(self, keys: array[int]) -> None:
        """Remove different keys; those that are not here are left alone."""
        if len(keys) <= _FEW:
            for key in keys:
                bucket = self._bucket_of(key)
                slot = self._slot_in(bucket, key)
                if slot >= 0:
                    self._key_cells[slot] = 0
                    self._total -= 1
                else:
                    self._unspill(bucket, key)
        else:
            found, buckets, slots = self._look_up(np.frombuffer(keys, dtype=np.uint64))
            self._keys[slots] = 0
            self._total -= slots.size
            for position, bucket in self._maybe_spilled(buckets, found):
                self._unspill(bucket, keys[position])
        if self._total < self._fewest:
            self._turn_to(_num_buckets_for(self._total))
        if self._num_buckets != self._target:
            self._go_on(len(keys))

    def items(self) -> tuple[Keys, Places]:
        """All keys and their places, in no order."""
        slots = self._keys.nonzero()[0]
        spilled = np.fromiter(chain.from_iterable(self._spilled.values()), np.uint64)
        return (
            np.concatenate((self._keys[slots], spilled[::2])),
            np.concatenate((self._places[slots], spilled[1::2].view(np.int64))),
        )

    # Where keys stand

    def _bucket_of(self, key: int) -> int:
        bucket = key & self._mask
        return bucket if bucket < self._num_buckets else bucket - (self._mask + 1 >> 1)  # not split yet

    def _buckets_of(self, keys: Keys) -> Indices:
        buckets = (keys & np.uint64(self._mask)).view(np.int64)  # numpy is slow with indices of any other type
        if self._num_buckets <= self._mask:
            buckets[buckets >= self._num_buckets] -= self._mask + 1 >> 1
        return buckets

    def _slot_in(self, bucket: int, key: int) -> int:
        """The slot of one key, -1 when it stands in none."""
        return self._search(bucket, key.to_bytes(_KEY_BYTES, sys.byteorder)) if key else -1

    def _search(self, bucket: int, pattern: bytes) -> int:
        start = bucket * _BUCKET_BYTES
        end = start + _BUCKET_BYTES
        at = self._key_memory.find(pattern, start, end)
        while at & _KEY_BYTES - 1 and at >= 0:  # the end of one key and the front of the next
            at = self._key_memory.find(pattern, at + 1, end)
        return at >> 3

    def _look_up(self, keys: Keys) -> tuple[Indices, Indices, Indices]:
        """The positions of those keys that stand in slots, the buckets of all keys, and the slots of those found."""
        buckets = self._buckets_of(keys)
        hits = (self._rows.take(buckets, 0).ravel() == keys.repeat(_WIDTH)).nonzero()[0]
        found = hits >> _WIDTH_BITS
        slots = (buckets.take(found) << _WIDTH_BITS) + (hits & _WIDTH - 1)
        if not keys.all():  # an empty slot is no key 0
            is_key = keys[found] != 0
            found, slots = found[is_key], slots[is_key]
        return found, buckets, slots

    # What does not fit into its bucket

    def _maybe_spilled(self, buckets: Indices, found: Indices) -> list[tuple[int, int]]:
        """Which keys may have been spilled: position and bucket of those that are not among the ``found`` ones."""
        if not self._spilled:
            return []
        maybe = self._has_spilled.take(buckets)
        maybe[found] = False
        positions = maybe.nonzero()[0]
        return list(zip(positions.tolist(), buckets.take(positions).tolist(), strict=True))

    def _spill(self, bucket: int, key: int, place: int) -> None:
        self._spilled.setdefault(bucket, array("Q")).extend((key, place))
        self._has_spilled[bucket] = True

    def _unspill(self, bucket: int, key: int) -> None:
        spilled = self._spilled.get(bucket, _NONE)
        at = _position(spilled, key)
        if at < 0:
            return
        del spilled[at : at + 2]
        self._total -= 1
        if not spilled:
            del self._spilled[bucket]
            self._has_spilled[bucket] = False

    # Adding

    def _insert(self, key: int, place: int) -> None:
        self._total += 1
        bucket = self._bucket_of(key)
        slot = self._search(bucket, _EMPTY) if key else -1
        if slot >= 0:
            self._key_cells[slot] = key
            self._place_cells[slot] = place
        else:
            self._spill(bucket, key, place)

    def _insert_many(self, keys: Keys, places: Places) -> None:
        while keys.size > _FEW:
            buckets = self._buckets_of(keys)
            free = _FIRST_FREE.take(np.packbits(self._rows.take(buckets, 0) == 0))  # a byte for each bucket
            slots = (buckets << _WIDTH_BITS) + free
            has_room = (free < _WIDTH) & (keys != 0)
            if not has_room.all():
                full = ~has_room
                for one in zip(buckets[full].tolist(), keys[full].tolist(), places[full].tolist(), strict=True):
                    self._spill(*one)
                    self._total += 1
                keys, places, slots = keys[has_room], places[has_room], slots[has_room]
            self._keys[slots] = keys
            # Of several writers of one slot the last stays; the others try again.
            is_beaten = self._keys.take(slots) != keys
            num_beaten = int(np.count_nonzero(is_beaten))
            self._total += keys.size - num_beaten
            if not num_beaten:
                self._places[slots] = places
                return
            stays = ~is_beaten
            self._places[slots[stays]] = places[stays]
            keys, places = keys[is_beaten], places[is_beaten]
        for key, place in zip(keys.tolist(), places.tolist(), strict=True):
            self._insert(key, place)

    # Growing and shrinking

    def _turn_to(self, num_buckets: int) -> None:
        """From now on it becomes so large."""
        self._target = num_buckets
        self._most = int(_MOST * _WIDTH * num_buckets)
        self._fewest = int(_FEWEST * _WIDTH * num_buckets) if num_buckets > _MIN_BUCKETS else 0
        self._resize(max(num_buckets, self._num_buckets))

    def _go_on(self, num_keys: int) -> None:
        """Split or merge a few buckets, where that is under way; ``num_keys`` come or have gone meanwhile."""
        left = self._step + _STEP_PER_KEY * num_keys
        while left > 0 and self._num_buckets != self._target:
            half = self._mask + 1 >> 1
            if self._num_buckets < self._target:
                whole = half if self._num_buckets <= self._mask else self._mask + 1  # before it began to double
                count = min(left, 2 * whole - self._num_buckets)
                self._split(self._num_buckets - whole, count, whole)
            else:
                count = min(left, self._num_buckets - max(half, self._target))
                self._merge(count, half)
            left -= count

    def _split(self, first: int, count: int, whole: int) -> None:
        """Of so many buckets from ``first`` on what has the next bit goes to new ones, ``whole`` further on."""
        spilled = self._take_spilled(first, count)
        self._num_buckets += count
        self._view()
        old, new = slice(first, first + count), slice(first + whole, first + whole + count)
        np.multiply(self._rows[old], (self._rows[old] & np.uint64(whole)) != 0, out=self._rows[new])
        self._rows[old] -= self._rows[new]  # what has gone leaves 0
        places = self._places.reshape(-1, _WIDTH)
        places[new] = places[old]
        self._has_spilled[new] = False
        self._put_back(spilled)

    def _merge(self, count: int, half: int) -> None:
        """The last buckets, so many, go into those ``half`` before them."""
        first = self._num_buckets - count
        spilled = self._take_spilled(first, count)
        start = first << _WIDTH_BITS
        slots = self._keys[start:].nonzero()[0]
        keys, places = self._keys[start:][slots], self._places[start:][slots]
        self._num_buckets = first
        self._resize(first)
        self._total -= keys.size
        self._insert_many(keys, places)
        self._put_back(spilled)

    def _take_spilled(self, first: int, count: int) -> list[array[int]]:
        taken = []
        for bucket in (self._has_spilled[first : first + count].nonzero()[0] + first).tolist():
            taken.append(self._spilled.pop(bucket))
            self._has_spilled[bucket] = False
        return taken

    def _put_back(self, spilled: list[array[int]]) -> None:
        for pairs in spilled:
            self._total -= len(pairs) // 2  # they are counted as they come in
            for key, place in zip(pairs[::2], pairs[1::2], strict=True):
                self._insert(key, place)

    def _resize(self, num_buckets: int) -> None:
        """Gives the memory this length. What is new of it is empty, or what was there before."""
        # Mapped memory keeps its length while it is looked at.
        del self._keys, self._key_cells, self._rows, self._places, self._place_cells, self._has_spilled
        self._key_memory.resize(_BUCKET_BYTES * num_buckets + _BEYOND_BYTES)
        self._place_memory.resize(_BUCKET_BYTES * num_buckets)
        self._spill_memory.resize(num_buckets)
        self._view()

    def _view(self) -> None:
        self._mask = (1 << (self._num_buckets - 1).bit_length()) - 1
        num_slots = _WIDTH * self._num_buckets
        self._keys = np.frombuffer(self._key_memory, np.uint64, num_slots)
        self._key_cells = self._keys.data  # the same, quicker one by one
        self._rows = self._keys.reshape(-1, _WIDTH)
        self._places = np.frombuffer(self._place_memory, np.int64, num_slots)
        self._place_cells = self._places.data
        self._has_spilled = np.frombuffer(self._spill_memory, np.bool_, self._num_buckets)


def _memory(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _num_buckets_for(num_keys: int) -> int:
    """As few as so many keys may have."""
    return max(_MIN_BUCKETS, 1 << int(num_keys / (_MOST * _WIDTH)).bit_length())


def _position(spilled: array[int], key: int) -> int:
    """Where a key stands among keys and places in turn, -1: nowhere."""
    keys = spilled[::2]
    return 2 * keys.index(key) if key in keys else -1
