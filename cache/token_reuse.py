"""Reuse inside a block: which cached block starts with the tokens a prompt goes on with after its last full hit.

Block hashes find whole blocks only. The blocks that follow one hash are kept here under their first token, full ones
and the partial last blocks of requests that have ended, so that the longest common front can be copied. A block is
compared only with what has the same extra keys: never across a salt, an adapter or an image.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import NamedTuple

from cache.block_hash import BlockHash, ExtraKeys


class _Child(NamedTuple):
    parent: BlockHash
    tokens: array[int]
    extra: ExtraKeys | None


_MAX_COMPARED = 64


class BlockFronts:
    """Cached blocks by the hash they follow. Of those with one parent and first token the newest 64 are compared."""

    __slots__ = ("_by_block", "_by_front")

    def __init__(self) -> None:
        self._by_block: dict[int, _Child] = {}
        self._by_front: dict[tuple[BlockHash, int], dict[int, None]] = {}

    def add(self, block: int, parent: BlockHash, tokens: array[int], extra: ExtraKeys | None) -> None:
        """``block`` holds the KV of ``tokens`` (at least one) after ``parent``."""
        self._by_block[block] = _Child(parent, tokens, extra)
        self._by_front.setdefault((parent, tokens[0]), {})[block] = None

    def discard(self, block: int) -> None:
        """The block holds something else now. Unknown blocks are left alone."""
        child = self._by_block.pop(block, None)
        if child is not None:
            front = (child.parent, child.tokens[0])
            siblings = self._by_front[front]
            del siblings[block]
            if not siblings:
                del self._by_front[front]

    def longest(self, parent: BlockHash, tokens: array[int], extra: ExtraKeys | None) -> tuple[int, int] | None:
        """(block, number of common leading tokens) of the best block after ``parent``; None when none has any."""
        best: tuple[int, int] | None = None
        siblings = self._by_front.get((parent, tokens[0]), {}) if tokens else {}
        for block in islice(reversed(siblings), _MAX_COMPARED):
            child = self._by_block[block]
            if child.extra != extra:
                continue
            common = _num_common(child.tokens, tokens)
            if best is None or common > best[1]:
                best = (block, common)
        return best

    def clear(self) -> None:
        """Forget all blocks."""
        self._by_block.clear()
        self._by_front.clear()

    def blocks(self) -> set[int]:
        """Every block kept here."""
        return set(self._by_block)


def _num_common(first: array[int], second: array[int]) -> int:
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))
