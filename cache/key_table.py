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
        keys, places, mask = self._key_array, self._place_array, self._mask
        slot = key & mask
        while (place := places[slot]) != _EMPTY:
            if place >= 0 and keys[slot] == key:
                return place
            slot = slot + 1 & mask
        return ABSENT

    def find_many(self, keys: Keys) -> Places:
        """The places of many keys."""
        slots = self._slots_of(keys)
        return np.where(slots >= 0, self._places[slots], ABSENT)

    def insert_many(self, keys: Keys, places: Places) -> None:
        """Add keys that are all different and not here."""
        self._make_room(keys.size)
        slots = self._first_slots(keys)
        waiting = np.arange(keys.size)
        while waiting.size:
            aimed = slots[waiting]
            is_free = self._places[aimed] < 0
            writers, written = waiting[is_free], aimed[is_free]
            self._keys[written] = keys[writers]
            self._places[written] = places[writers]
            # Of several writers of one slot the last stays; the others look further.
            beaten = writers[self._keys[written] != keys[writers]]
            waiting = np.concatenate((waiting[~is_free], beaten))
            slots[waiting] = slots[waiting] + 1 & self._mask
        self._num_live += keys.size

    def delete_many(self, keys: Keys) -> None:
        """Remove different keys; those that are not here are left alone."""
        slots = self._slots_of(keys)
        slots = slots[slots >= 0]
        self._places[slots] = _DELETED
        self._num_live -= slots.size
        self._num_deleted += slots.size

    def items(self) -> tuple[Keys, Places]:
        """All keys and their places, in no order."""
        live = self._places >= 0
        return self._keys[live], self._places[live]

    def _first_slots(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys & np.uint64(self._mask)).astype(np.int64)

    def _slots_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """The slot of each key, -1 for those that are not here."""
        slots = self._first_slots(keys)
        looking = np.arange(keys.size)
        while looking.size:
            aimed = slots[looking]
            places = self._places[aimed]
            is_found = (self._keys[aimed] == keys[looking]) & (places >= 0)
            slots[looking[places == _EMPTY]] = -1
            looking = looking[~is_found & (places != _EMPTY)]
            slots[looking] = slots[looking] + 1 & self._mask
        return slots

    def _make_room(self, count: int) -> None:
        num_slots = self._mask + 1
        if (self._num_live + self._num_deleted + count) * 5 <= num_slots * 3:
            return
        keys, places = self.items()
        wanted = (keys.size + count) * 2
        self._allocate(max(_MIN_SLOTS, 1 << (wanted - 1).bit_length()))
        self.insert_many(keys, places)

    def _allocate(self, num_slots: int) -> None:
        self._key_array = array("Q", bytes(8 * num_slots))
        self._place_array = array("q", b"\xff" * (8 * num_slots))
        self._keys = np.frombuffer(self._key_array, dtype=np.uint64)
        self._places = np.frombuffer(self._place_array, dtype=np.int64)
        self._mask = num_slots - 1
        self._num_live = 0
        self._num_deleted = 0
