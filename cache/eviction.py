"""In what order idle blocks that hold something are taken: the eviction policy of the device.

``lru`` takes the one that nobody has used for longest. ``slru`` keeps blocks that were hit before apart, behind the
ordinary ones and up to a share of the pool, so that a flood of one-shot prompts does not push them out. Blocks that
requests asked to keep (``cache.retention``) come last under either, those of the lowest priority first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from cache.block_hash import BlockHash
from cache.block_pool import BlockIds, BlockPool
from cache.device_tier import DeviceTier
from cache.retention import RetainedBlocks, Retention, RetentionBudget

EvictionPolicy: TypeAlias = Literal["lru", "slru"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)

PROTECTED_SHARE = 0.25
"""Under ``slru``, at most this share of the pool is idle blocks that were hit before (docs/cache.md has the study)."""

_ORDINARY, _PROTECTED, _RETAINED = 0, 1, 2  # classes of the pool's queues; a retained block's priority is added


class EvictionOrder:
    """Puts idle blocks into the classes of ``pool``; knows which were hit and which are to be kept.

    ``now`` is in seconds on the cache's clock. Raises ``ValueError`` for an unknown policy.
    """

    __slots__ = ("_device", "_is_slru", "_max_protected", "_pool", "_retained", "_was_hit")

    def __init__(self, pool: BlockPool, device: DeviceTier, policy: EvictionPolicy, budget: RetentionBudget) -> None:
        if policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction policy {policy!r} is not one of {', '.join(EVICTION_POLICIES)}")
        self._pool, self._device = pool, device
        self._is_slru = policy == "slru"
        self._max_protected = int(PROTECTED_SHARE * pool.num_blocks)
        self._was_hit = np.zeros(pool.num_blocks, dtype=np.bool_)
        self._retained = RetainedBlocks(budget)

    @property
    def num_retained(self) -> int:
        """Blocks to be kept, used and idle ones."""
        return len(self._retained)

    def hit(self, blocks: BlockIds | Sequence[int]) -> None:
        """A request found these."""
        self._was_hit[blocks] = True

    def touch(self, front: Sequence[BlockHash], now: float) -> None:
        """The time of retained blocks in the front of a chain starts anew."""
        if len(self._retained):
            self._retained.touch(front, now)

    def retain(
        self,
        hashes: Sequence[BlockHash],
        depths: range,
        wishes: Sequence[Retention],
        tenant: str,
        block_size: int,
        now: float,
    ) -> None:
        """Keep the blocks at ``depths`` (a front) of a chain as far as ``wishes`` and budget go."""
        if wishes:
            self._retained.mark(hashes, depths, wishes, tenant, block_size, now)

    def forget(self, blocks: BlockIds, lost: Sequence[BlockHash]) -> None:
        """These were taken for something else, and of ``lost`` no copy is left on the device."""
        self._was_hit[blocks] = False
        if len(self._retained):
            deque(map(self._retained.forget, lost), maxlen=0)

    def pass_time(self, now: float) -> None:
        """Marks whose time is over end; their idle blocks become ordinary ones, as if just used."""
        if not len(self._retained):
            return
        copies = [block for name in self._retained.expire(now) for block in self._device.copies_of(name)]
        if not copies:
            return
        blocks = np.array(copies, dtype=np.int32)
        self.requeue(blocks[(self._pool.references[blocks] == 0) & (self._pool.class_of[blocks] >= _RETAINED)], now)

    def requeue(self, idle: BlockIds, now: float) -> None:
        """Idle blocks wait again as if they had just been used."""
        self._pool.withdraw(idle)
        self.queue(idle, now)

    def queue(self, idle: BlockIds, now: float) -> None:
        """Blocks in no queue wait at the end of their class, the first of ``idle`` to go first."""
        if not idle.size:
            return
        if len(self._retained):
            classes = self._classes_of(idle)
            for queue_class in np.unique(classes).tolist():
                self._pool.queue_back(idle[classes == queue_class], queue_class, now)
        else:
            was_hit = self._was_hit[idle]
            if self._is_slru and was_hit.any():
                self._pool.queue_back(idle[~was_hit], _ORDINARY, now)
                self._pool.queue_back(idle[was_hit], _PROTECTED, now)
            else:
                self._pool.queue_back(idle, _ORDINARY, now)
        excess = self._pool.num_idle_in(_PROTECTED) - self._max_protected
        if excess > 0:
            self._pool.shift(_PROTECTED, _ORDINARY, excess)

    def clear(self) -> None:
        """Every idle block is an ordinary one, in the order in which they would have been taken."""
        self._was_hit[:] = False
        self._retained.clear()
        self._pool.merge_classes()

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when anything here contradicts the device. For tests."""
        self._retained.check_invariants()
        assert self._retained.names() <= self._device.names()

    def _classes_of(self, idle: BlockIds) -> Any:
        priorities = [
            None if name is None else self._retained.priority_of(name) for name in self._device.names_of(idle)
        ]
        classes = np.array([-1 if p is None else _RETAINED + p for p in priorities], dtype=np.int16)
        ordinary = classes < 0
        classes[ordinary] = self._was_hit[idle[ordinary]] if self._is_slru else _ORDINARY
        return classes
