"""Which prefix each block of the device holds, and which blocks hold a given prefix.

Two requests that compute the same block at the same time keep a copy each. The oldest copy is the one that is found;
when it goes the next oldest takes its place, and the hash has left the device with the last.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from cache.block_hash import ROOT_KEY, BlockHash
from cache.block_pool import BlockIds
from cache.host_tier import Keys

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class DeviceTier:
    """``num_blocks`` blocks, block 0 included. Plain data, one owner: the prefix cache."""

    __slots__ = ("_block_of", "_hashes", "_more_copies", "_parent_keys", "holds_hash", "keys")

    def __init__(self, num_blocks: int) -> None:
        self.holds_hash: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        """By block; the other arrays say something of such blocks alone."""
        self.keys: Keys = np.zeros(num_blocks, dtype=np.uint64)
        self._parent_keys: Keys = np.zeros(num_blocks, dtype=np.uint64)
        self._hashes = np.empty(num_blocks, dtype=object)
        self._block_of: dict[BlockHash, int] = {}  # the oldest copy
        self._more_copies: dict[BlockHash, list[int]] = {}  # the younger ones, of the few hashes that have any

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, name: object) -> bool:
        return name in self._block_of

    def names(self) -> Set[BlockHash]:
        """Every hash held here."""
        return self._block_of.keys()

    def blocks_of(self, names: Sequence[BlockHash]) -> BlockIds:
        """The block to read each of ``names`` from; all of them are held."""
        if not names:
            return _NO_BLOCKS
        return np.fromiter(map(self._block_of.__getitem__, names), dtype=np.int32, count=len(names))

    def copies_of(self, name: BlockHash) -> list[int]:
        """Every block that holds it, the oldest first."""
        return [self._block_of[name], *self._more_copies.get(name, ())]

    def names_of(self, blocks: BlockIds) -> list[BlockHash | None]:
        """What each of ``blocks`` holds."""
        names: list[BlockHash | None] = self._hashes[blocks].tolist()
        return names

    def parent_keys_of(self, blocks: BlockIds) -> Keys:
        """The index key that each of ``blocks`` follows."""
        return self._parent_keys[blocks]

    def put(self, names: Sequence[BlockHash], blocks: array[int], keys: array[int], parent_key: int) -> list[bool]:
        """``blocks`` hold ``names`` from here on, each after the one before it, the first after ``parent_key``.

        Says of each whether it is the first copy.
        """
        oldest = list(map(self._block_of.setdefault, names, blocks))
        ids = np.frombuffer(blocks, dtype=np.int32)
        # numpy would turn a list of bytes into a fixed-width string type, so the objects are put in one by one.
        objects = np.empty(len(blocks), dtype=object)
        objects[:] = names
        self._hashes[ids] = objects
        self.holds_hash[ids] = True
        packed = np.frombuffer(keys, dtype=np.uint64)
        self.keys[ids] = packed
        self._parent_keys[ids[1:]] = packed[:-1]
        self._parent_keys[ids[0]] = parent_key
        if oldest == blocks:
            return [True] * len(blocks)
        is_first = [block == first for block, first in zip(blocks, oldest, strict=True)]
        for name, block, first in zip(names, blocks, is_first, strict=True):
            if not first:
                self._more_copies.setdefault(name, []).append(block)
        return is_first

    def take_out(self, blocks: BlockIds) -> tuple[BlockIds, list[BlockHash]]:
        """``blocks`` hold nothing any more: those that had the last copy of a hash, and these hashes."""
        held = blocks[self.holds_hash[blocks]]
        if not held.size:
            return _NO_BLOCKS, []
        names: list[BlockHash] = self._hashes[held].tolist()
        self._hashes[held] = None
        self.holds_hash[held] = False
        if not self._more_copies:
            deque(map(self._block_of.__delitem__, names), maxlen=0)
            return held, names
        is_last = [self._remove_copy(name, block) for name, block in zip(names, held.tolist(), strict=True)]
        return held[is_last], [name for name, last in zip(names, is_last, strict=True) if last]

    def contents(self) -> tuple[Keys, Keys]:
        """The keys held here, each once, and the key that each of them follows. Linear."""
        is_first = self.holds_hash.copy()
        for others in self._more_copies.values():
            is_first[others] = False
        blocks = np.flatnonzero(is_first)
        return self.keys[blocks], self._parent_keys[blocks]

    def cached_block_hashes(self) -> dict[int, BlockHash]:
        """Block number to hash, copies included. Linear."""
        return {block: self._hashes[block] for block in np.flatnonzero(self.holds_hash).tolist()}

    def clear(self) -> None:
        """Forget every hash."""
        self.holds_hash[:] = False
        self._hashes[:] = None
        self._block_of.clear()
        self._more_copies.clear()

    def check_invariants(self) -> set[int]:
        """Every key held here and the root's. Raises ``AssertionError`` for a contradiction. Linear; for tests."""
        copies: dict[BlockHash, list[int]] = {}
        for block, name in self.cached_block_hashes().items():
            copies.setdefault(name, []).append(block)
        assert {name: sorted(self.copies_of(name)) for name in self._block_of} == copies
        assert all(self._more_copies.values())
        assert self._more_copies.keys() <= self._block_of.keys()
        resident = {ROOT_KEY, *(int(self.keys[block]) for block in self._block_of.values())}
        for block in self._block_of.values():
            assert int(self._parent_keys[block]) in resident, "a cached block outlived its parent"
        assert (self.holds_hash == (self._hashes != None)).all()  # noqa: E711 (elementwise)
        return resident

    def _remove_copy(self, name: BlockHash, block: int) -> bool:
        """One copy of a hash goes; whether it was the last."""
        others = self._more_copies.get(name)
        if others is None:
            del self._block_of[name]
            return True
        if self._block_of[name] == block:
            self._block_of[name] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._more_copies[name]
        return False
