"""Prefixes that requests asked to keep for a while: a wish, bounded by a budget, never a pin.

A mark covers the leading blocks of a prompt. Each of its blocks keeps the longest time and the highest priority any
mark asked of it, so along a chain both can only fall: a block is never wanted more than the one it follows. A hit
starts its time anew. When the time is over the block is an ordinary one again, as if just used. An allocation takes
retained blocks when there are no others, lowest priority first; it never fails because of a mark.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from cache.block_hash import BlockHash

MAX_BREAKPOINTS = 4
MAX_PRIORITY = 100
MAX_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the blocks of the first ``num_tokens`` tokens for ``ttl_s`` after each use.

    Of retained blocks, those of a higher ``priority`` (0 to 100) go later.
    Raises ``ValueError`` for values out of range.
    """

    num_tokens: int
    ttl_s: float
    priority: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"retention of {self.num_tokens} tokens")
        if not 0 < self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"retention for {self.ttl_s} s is not within 0 to {MAX_TTL_S:.0f} s")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"retention priority {self.priority} is not within 0 to {MAX_PRIORITY}")


@dataclass(frozen=True, slots=True)
class RetentionBudget:
    """How many blocks may be retained, in all and by one tenant."""

    max_blocks: int
    max_blocks_per_tenant: int


@dataclass(slots=True)
class _Mark:
    depth: int
    ttl_s: float
    until_s: float
    priority: int
    tenant: str


class RetainedBlocks:
    """The marked block hashes of one cache: names, depths and times. The cache does the moving of blocks."""

    __slots__ = ("_budget", "_expiry", "_marks", "_num_by_tenant")

    def __init__(self, budget: RetentionBudget) -> None:
        self._budget = budget
        self._marks: dict[BlockHash, _Mark] = {}
        self._num_by_tenant: Counter[str] = Counter()
        self._expiry: list[tuple[float, int, BlockHash]] = []

    def __len__(self) -> int:
        return len(self._marks)

    def names(self) -> Set[BlockHash]:
        """The marked hashes."""
        return self._marks.keys()

    def priority_of(self, block_hash: BlockHash) -> int | None:
        """The priority of a marked block, None for others."""
        mark = self._marks.get(block_hash)
        return None if mark is None else mark.priority

    def mark(
        self,
        hashes: Sequence[BlockHash],
        depths: range,
        wishes: Sequence[Retention],
        tenant: str,
        block_size: int,
        now: float,
    ) -> None:
        """Mark the cached blocks at ``depths`` (a front) of a chain as far as ``wishes`` and budget go.

        A block is charged once, to the tenant who marked it first. Where the budget ends the rest stays unmarked, so
        what is marked is always a whole front of the chain.
        """
        for depth in depths:
            asked = [wish for wish in wishes if wish.num_tokens >= (depth + 1) * block_size]
            if not asked:
                break
            ttl_s = max(wish.ttl_s for wish in asked)
            priority = max(wish.priority for wish in asked)
            mark = self._marks.get(hashes[depth])
            if mark is not None:
                mark.priority = max(mark.priority, priority)
                mark.ttl_s = max(mark.ttl_s, ttl_s)
                mark.until_s = max(mark.until_s, now + mark.ttl_s)
                continue
            follows = not depth or hashes[depth - 1] in self._marks
            if (
                not follows
                or len(self._marks) >= self._budget.max_blocks
                or self._num_by_tenant[tenant] >= self._budget.max_blocks_per_tenant
            ):
                break
            self._marks[hashes[depth]] = _Mark(depth, ttl_s, now + ttl_s, priority, tenant)
            self._num_by_tenant[tenant] += 1
            heapq.heappush(self._expiry, (now + ttl_s, -depth, hashes[depth]))

    def touch(self, hashes: Iterable[BlockHash], now: float) -> None:
        """A hit starts the time of each marked block anew; ``hashes`` is the front of a chain."""
        for block_hash in hashes:
            mark = self._marks.get(block_hash)
            if mark is None:
                break
            mark.until_s = max(mark.until_s, now + mark.ttl_s)

    def expire(self, now: float) -> list[BlockHash]:
        """Unmark the blocks whose time is over; returned in the order they become ordinary, chain ends first."""
        over: list[tuple[float, int, BlockHash]] = []
        while self._expiry and self._expiry[0][0] <= now:
            _, _, block_hash = heapq.heappop(self._expiry)
            mark = self._marks.get(block_hash)
            if mark is None:
                continue
            entry = (mark.until_s, -mark.depth, block_hash)
            if mark.until_s > now:
                heapq.heappush(self._expiry, entry)
            else:
                over.append(entry)
                self.forget(block_hash)
        return [block_hash for _, _, block_hash in sorted(over)]

    def forget(self, block_hash: BlockHash) -> None:
        """The block was evicted or its time is over: its charge ends. Unmarked blocks are left alone."""
        mark = self._marks.pop(block_hash, None)
        if mark is None:
            return
        self._num_by_tenant[mark.tenant] -= 1
        if not self._num_by_tenant[mark.tenant]:
            del self._num_by_tenant[mark.tenant]
        if len(self._expiry) > 2 * len(self._marks) + 64:
            self._expiry = [(mark.until_s, -mark.depth, name) for name, mark in self._marks.items()]
            heapq.heapify(self._expiry)

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()
        self._num_by_tenant.clear()
        self._expiry.clear()

    def check_invariants(self) -> None:
        """Raises ``AssertionError`` when marks and charges disagree."""
        assert Counter(mark.tenant for mark in self._marks.values()) == self._num_by_tenant
        assert len(self._marks) <= self._budget.max_blocks
        assert all(count <= self._budget.max_blocks_per_tenant for count in self._num_by_tenant.values())
        assert self._marks.keys() <= {name for _, _, name in self._expiry}
