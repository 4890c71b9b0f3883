"""Blocks in host memory behind the device's: which prefix each holds, and which goes next.

What the device evicts comes here (``take_in``) and is copied back when a prompt wants it again. A block that returned
to the device keeps its place here as a *double* until that is needed: evicted once more it costs no copy. Doubles go
first, since nothing is lost with them; the others least recently used first.

No block is lost before what follows it, over both tiers: on the device a block never stands without the one before it,
so whatever comes here comes after all that follows it here, and goes after it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.block_hash import ROOT_KEY, BlockHash
from cache.block_pool import BlockIds, BlockPool

Keys = npt.NDArray[np.uint64]

_DOUBLE, _ALONE = 0, 1  # classes of the pool's queues; blocks that hold nothing stand before the doubles


class Lost(NamedTuple):
    """Hashes that had to go, the first to go first, and since when nobody had used them."""

    names: list[BlockHash]
    keys: Keys
    idle_since_s: float


class Demotion(NamedTuple):
    """What became of blocks that the device evicts.

    The first ``num_refused`` find no place. Of the others those at ``positions`` are to be copied to ``targets``, the
    rest stand here already. ``lost``: what made room.
    """

    num_refused: int
    positions: BlockIds
    targets: BlockIds
    lost: list[Lost]


def stretches(values: npt.NDArray[np.float64]) -> list[tuple[int, int, float]]:
    """(start, end, value) of each stretch of equal neighbours."""
    if not values.size:
        return []
    starts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()]
    return [(start, end, float(values[start])) for start, end in zip(starts, [*starts[1:], values.size], strict=True)]


class HostTier:
    """``num_blocks`` blocks, numbered from 1. Plain data, one owner: the prefix cache."""

    __slots__ = ("_block_of", "_hashes", "_is_held", "_keys", "_parent_keys", "_pool", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks + 1)
        self._block_of: dict[BlockHash, int] = {}
        self._is_held = np.zeros(num_blocks + 1, dtype=np.bool_)
        self._hashes = np.empty(num_blocks + 1, dtype=object)
        self._keys = np.zeros(num_blocks + 1, dtype=np.uint64)
        self._parent_keys = np.zeros(num_blocks + 1, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, name: object) -> bool:
        return name in self._block_of

    def contents(self) -> tuple[Keys, Keys]:
        """The keys held here, and the key that each of them follows. Linear."""
        held = np.flatnonzero(self._is_held)
        return self._keys[held], self._parent_keys[held]

    def cached_block_hashes(self) -> dict[int, BlockHash]:
        """Block number to hash. Linear."""
        return {block: name for name, block in self._block_of.items()}

    def order(self) -> list[int]:
        """Blocks, the next to be taken first. Linear."""
        return self._pool.in_order()

    def next_lost_idle_since_s(self) -> float | None:
        """Since when the hash that is lost next has been idle; None while there is a block that loses none."""
        following = self._pool.peek()
        if following is None or self._pool.class_of[following[0]] == _DOUBLE:
            return None
        return following[1]

    def use(self, names: Sequence[BlockHash]) -> BlockIds:
        """The blocks of ``names``, which stay until ``put_back``."""
        blocks = self._blocks_of(names)
        self._pool.use(blocks)
        return blocks

    def put_back(self, blocks: BlockIds, now: float) -> None:
        """What ``use`` gave stands on the device too from here on."""
        self._pool.queue_back(self._pool.drop(blocks), _DOUBLE, now)

    def double(self, names: Sequence[BlockHash], now: float) -> None:
        """These hashes have come to the device another way; unknown ones are left alone."""
        blocks = self._blocks_of([name for name in names if name in self._block_of])
        self._pool.withdraw(blocks)
        self._pool.queue_back(blocks, _DOUBLE, now)

    def renew(self, names: Sequence[BlockHash], now: float) -> None:
        """Queue these, which stand here alone and follow one another, as if just used."""
        blocks = self._blocks_of(names)[::-1]
        self._pool.withdraw(blocks)
        self._pool.queue_back(blocks, _ALONE, now)

    def take_in(
        self, names: Sequence[BlockHash], keys: Keys, parent_keys: Keys, idle_since_s: npt.NDArray[np.float64]
    ) -> Demotion:
        """The device evicts these, the first to go first: as many of the last of them as fit stand here alone now."""
        num_refused = max(0, len(names) - self._pool.num_idle)
        names, keys, parent_keys = names[num_refused:], keys[num_refused:], parent_keys[num_refused:]
        blocks = np.fromiter((self._block_of.get(name, 0) for name in names), dtype=np.int32, count=len(names))
        fresh = np.flatnonzero(blocks == 0)
        self._pool.withdraw(blocks[blocks > 0])
        lost: list[Lost] = []
        done = 0
        for taken, since_s in self._pool.take(fresh.size):
            held = taken[self._is_held[taken]]
            if held.size:
                gone: list[BlockHash] = self._hashes[held].tolist()
                for name in gone:
                    del self._block_of[name]
                lost.append(Lost(gone, self._keys[held], since_s))
            blocks[fresh[done : done + taken.size]] = self._pool.drop(taken)
            done += taken.size
        objects = np.empty(len(names), dtype=object)
        objects[:] = names
        self._hashes[blocks] = objects
        self._is_held[blocks] = True
        self._keys[blocks] = keys
        self._parent_keys[blocks] = parent_keys
        self._block_of.update(zip(names, blocks.tolist(), strict=True))
        for start, end, since_s in stretches(idle_since_s[num_refused:]):
            self._pool.queue_back(blocks[start:end], _ALONE, since_s)
        return Demotion(num_refused, (fresh + num_refused).astype(np.int32), blocks[fresh], lost)

    def clear(self) -> None:
        """Forget every hash. Nothing is in use."""
        self._block_of.clear()
        self._is_held[:] = False
        self._hashes[:] = None
        self._pool.merge_classes()

    def check_invariants(self, on_device: Set[BlockHash], device_keys: Set[int]) -> None:
        """Raises ``AssertionError`` when anything here contradicts anything else. Linear; for tests."""
        self._pool.check_invariants()
        assert not self._pool.references.any(), "a block of the host tier is in use outside of an admission"
        assert self._block_of == {self._hashes[block]: block for block in np.flatnonzero(self._is_held).tolist()}
        position = {block: count for count, block in enumerate(self._pool.in_order())}
        block_of_key = {int(self._keys[block]): block for block in self._block_of.values()}
        for name, block in self._block_of.items():
            assert self._pool.class_of[block] == (_DOUBLE if name in on_device else _ALONE)
            parent_key = int(self._parent_keys[block])
            if parent_key == ROOT_KEY or parent_key in device_keys:
                continue
            assert parent_key in block_of_key, "a block outlived the one before it"
            assert position[block_of_key[parent_key]] > position[block], "a block will go before what follows it"

    def _blocks_of(self, names: Sequence[BlockHash]) -> BlockIds:
        return np.fromiter(map(self._block_of.__getitem__, names), dtype=np.int32, count=len(names))
