"""Where each index key stands: a table of small buckets in two flat arrays, 16 bytes per slot.

A dict takes about 130 bytes per entry; a router holds millions. Index keys are hashes already, so their low bits
are the bucket, and a bucket is eight slots in any order, one line of a processor's cache. What does not fit into its
bucket (some per cent of a full table) stands in a dict beside it. Many keys go in and out at once by numpy, whole
buckets at a time, single ones by plain indexing of the same memory.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]

ABSENT = -1
_WIDTH, _WIDTH_BITS = 8, 3
_MIN_BUCKETS = 8
_MOST, _FEWEST = 0.6, 0.1  # keys per slot: above it grows, below it shrinks
_AT_ONCE = 1 << 15  # keys that a rebuild moves: each brings its whole bucket along
_FEW = 12
"""Up to here one by one is quicker than numpy."""
# The first free slot of a bucket by the byte that np.packbits makes of its slots; 8: none is free.
_FIRST_FREE = np.array([8 - bits.bit_length() for bits in range(256)], dtype=np.int64)


class KeyTable:
    """Key to place (a number from 0); ``ABSENT`` for keys that are not here."""

    __slots__ = (
        "_key_array",
        "_keys",
        "_mask",
        "_num_spilled",
        "_place_array",
        "_places",
        "_rows",
        "_spilled",
        "_total",
    )

    def __init__(self) -> None:
        self._allocate(_MIN_BUCKETS)

    def __len__(self) -> int:
        return self._total

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, and about that of the dict."""
        return (2 * 8 * _WIDTH + 4) * (self._mask + 1) + 130 * len(self._spilled)

    def find(self, key: int) -> int:
        """The place of one key."""
        slot = self._slot_of(key)
        return self._place_array[slot] if slot >= 0 else self._spilled.get(key, ABSENT)

    def num_absent(self, keys: array[int]) -> int:
        """How many of the leading ``keys`` are not here."""
        if len(keys) <= _FEW:
            slots, mask, spilled = self._key_array, self._mask, self._spilled
            for position, key in enumerate(keys):
                start = (key & mask) << _WIDTH_BITS
                if (key in slots[start : start + _WIDTH] and key) or key in spilled:
                    return position
            return len(keys)
        wanted = np.frombuffer(keys, dtype=np.uint64)
        found, buckets, _ = self._look_up(wanted)
        count = int(found[0]) if found.size else len(keys)
        for position in self._maybe_spilled(buckets):
            if position >= count:
                break
            if keys[position] in self._spilled:
                return position
        return count

    def insert_run(self, keys: array[int], first_place: int) -> None:
        """Add keys that are all different and not here, at places that count up from ``first_place``."""
        self._make_room(len(keys))
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
                slot = self._slot_of(key)
                if slot >= 0:
                    self._key_array[slot] = 0
                    self._total -= 1
                else:
                    self._unspill(key)
        else:
            _, buckets, slots = self._look_up(np.frombuffer(keys, dtype=np.uint64))
            self._keys[slots] = 0
            self._total -= slots.size
            for position in self._maybe_spilled(buckets):
                self._unspill(keys[position])
        if self._total < _FEWEST * _WIDTH * (self._mask + 1) and self._mask >= _MIN_BUCKETS:
            self._rebuild(self._total)

    def items(self) -> tuple[Keys, Places]:
        """All keys and their places, in no order."""
        slots = self._keys.nonzero()[0]
        keys = np.fromiter(self._spilled.keys(), np.uint64, len(self._spilled))
        places = np.fromiter(self._spilled.values(), np.int64, len(self._spilled))
        return np.concatenate((self._keys[slots], keys)), np.concatenate((self._places[slots], places))

    def _slot_of(self, key: int) -> int:
        """The slot of one key, -1 when it stands in none."""
        start = (key & self._mask) << _WIDTH_BITS
        try:
            return self._key_array.index(key, start, start + _WIDTH) if key else -1
        except ValueError:
            return -1

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

    def _buckets_of(self, keys: Keys) -> Indices:
        return (keys & np.uint64(self._mask)).view(np.int64)  # numpy is slow with indices of any other type

    def _maybe_spilled(self, buckets: Indices) -> list[int]:
        """The positions of those buckets that something has been spilled from."""
        return self._num_spilled.take(buckets).nonzero()[0].tolist() if self._spilled else []

    def _spill(self, key: int, place: int) -> None:
        self._spilled[key] = place
        self._num_spilled[key & self._mask] += 1

    def _unspill(self, key: int) -> None:
        if self._spilled.pop(key, None) is not None:
            self._num_spilled[key & self._mask] -= 1
            self._total -= 1

    def _insert(self, key: int, place: int) -> None:
        self._total += 1
        start = (key & self._mask) << _WIDTH_BITS
        try:
            slot = self._key_array.index(0, start, start + _WIDTH)
        except ValueError:
            slot = -1
        if slot >= 0 and key:
            self._key_array[slot] = key
            self._place_array[slot] = place
        else:
            self._spill(key, place)

    def _insert_many(self, keys: Keys, places: Places) -> None:
        while keys.size > _FEW:
            buckets = self._buckets_of(keys)
            free = _FIRST_FREE.take(np.packbits(self._rows.take(buckets, 0) == 0))  # a byte for each bucket
            slots = (buckets << _WIDTH_BITS) + free
            has_room = (free < _WIDTH) & (keys != 0)
            if not has_room.all():
                for key, place in zip(keys[~has_room].tolist(), places[~has_room].tolist(), strict=True):
                    self._spill(key, place)
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

    def _make_room(self, count: int) -> None:
        if self._total + count > _MOST * _WIDTH * (self._mask + 1):
            self._rebuild(self._total + count)

    def _rebuild(self, count: int) -> None:
        """With as few buckets as ``count`` keys may have."""
        keys, places = self.items()
        self._allocate(max(_MIN_BUCKETS, 1 << int(count / (_MOST * _WIDTH)).bit_length()))
        for start in range(0, keys.size, _AT_ONCE):
            self._insert_many(keys[start : start + _AT_ONCE], places[start : start + _AT_ONCE])

    def _allocate(self, num_buckets: int) -> None:
        self._key_array = array("Q", bytes(8 * _WIDTH * num_buckets))
        self._place_array = array("q", bytes(8 * _WIDTH * num_buckets))
        self._keys = np.frombuffer(self._key_array, dtype=np.uint64)
        self._rows = self._keys.reshape(-1, _WIDTH)
        self._places = np.frombuffer(self._place_array, dtype=np.int64)
        self._mask = num_buckets - 1
        self._spilled: dict[int, int] = {}
        self._num_spilled = np.zeros(num_buckets, dtype=np.uint32)  # by bucket
        self._total = 0
