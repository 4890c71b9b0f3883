"""Where each index key stands: an open-addressing table in two flat arrays, 16 bytes per slot.

A dict takes about 130 bytes per entry; a router holds millions. Index keys are hashes already, so their low bits
are the slot. Many keys go in and out at once by numpy, single ones by plain indexing of the same memory.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

ABSENT = -1
_EMPTY, _DELETED = -1, -2
_MIN_SLOTS = 64
_FEW = 24
"""Up to here one by one is quicker than numpy."""


class KeyTable:
    """Key to place (a number from 0); ``ABSENT`` for keys that are not here."""

    __slots__ = ("_key_array", "_keys", "_mask", "_num_deleted", "_num_live", "_place_array", "_places")

    def __init__(self) -> None:
        self._allocate(_MIN_SLOTS)

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_bytes(self) -> int:
        """Memory of the two arrays."""
        return 16 * (self._mask + 1)

    def find(self, key: int) -> int:
        """The place of one key."""
        slot = self._slot_of(key)
        return ABSENT if slot < 0 else self._place_array[slot]

    def num_absent(self, keys: array[int]) -> int:
        """How many of the leading ``keys`` are not here."""
        if len(keys) <= _FEW:
            return next((count for count, key in enumerate(keys) if self._slot_of(key) >= 0), len(keys))
        is_here = self._slots_of(np.frombuffer(keys, dtype=np.uint64)) >= 0
        return int(is_here.argmax()) if is_here.any() else len(keys)

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
            few = [slot for slot in map(self._slot_of, keys) if slot >= 0]
            for slot in few:
                self._place_array[slot] = _DELETED
            count = len(few)
        else:
            slots = self._slots_of(np.frombuffer(keys, dtype=np.uint64))
            slots = slots[slots >= 0]
            self._places[slots] = _DELETED
            count = slots.size
        self._num_live -= count
        self._num_deleted += count

    def items(self) -> tuple[Keys, Places]:
        """All keys and their places, in no order."""
        live = self._places >= 0
        return self._keys[live], self._places[live]

    def _first_slots(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys & np.uint64(self._mask)).astype(np.int64)

    def _slot_of(self, key: int) -> int:
        """The slot of one key, -1 when it is not here."""
        keys, places, mask = self._key_array, self._place_array, self._mask
        slot = key & mask
        while (place := places[slot]) != _EMPTY:
            if keys[slot] == key and place >= 0:
                return slot
            slot = slot + 1 & mask
        return -1

    def _slots_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The slot of each key, -1 for those that are not here."""
        # Most keys stand in their first slot or meet an empty one there; the few others are followed one by one.
        slots = self._first_slots(keys)
        places = self._places[slots]
        is_elsewhere = (self._keys[slots] != keys) | (places < 0)
        slots[is_elsewhere] = -1
        rest = np.flatnonzero(is_elsewhere & (places != _EMPTY))
        slots[rest] = [self._slot_of(key) for key in keys[rest].tolist()]
        return slots

    def _insert(self, key: int, place: int) -> None:
        slot = key & self._mask
        while self._place_array[slot] >= 0:
            slot = slot + 1 & self._mask
        self._key_array[slot] = key
        self._place_array[slot] = place
        self._num_live += 1

    def _insert_many(self, keys: Keys, places: Places) -> None:
        waiting = np.arange(keys.size)
        slots = self._first_slots(keys)
        while waiting.size > _FEW:
            aimed = slots[waiting]
            is_free = self._places[aimed] < 0
            writers, written = waiting[is_free], aimed[is_free]
            self._keys[written] = keys[writers]
            self._places[written] = places[writers]
            # Of several writers of one slot the last stays; the others look further.
            beaten = writers[self._keys[written] != keys[writers]]
            waiting = np.concatenate((waiting[~is_free], beaten))
            slots[waiting] = slots[waiting] + 1 & self._mask
        self._num_live += keys.size - waiting.size
        for key, place in zip(keys[waiting].tolist(), places[waiting].tolist(), strict=True):
            self._insert(key, place)

    def _make_room(self, count: int) -> None:
        num_slots = self._mask + 1
        if (self._num_live + self._num_deleted + count) * 2 <= num_slots:
            return
        keys, places = self.items()
        wanted = (keys.size + count) * 2
        self._allocate(max(_MIN_SLOTS, 1 << (wanted - 1).bit_length()))
        self._insert_many(keys, places)

    def _allocate(self, num_slots: int) -> None:
        self._key_array = array("Q", bytes(8 * num_slots))
        self._place_array = array("q", b"\xff" * (8 * num_slots))
        self._keys = np.frombuffer(self._key_array, dtype=np.uint64)
        self._places = np.frombuffer(self._place_array, dtype=np.int64)
        self._mask = num_slots - 1
        self._num_live = 0
        self._num_deleted = 0
